// The CUDA side of the suites: on the stand-in, or with -DAUTOHETE_REAL_GPU on a GPU.
#include <cuda_runtime_api.h>

#include <memory>

#include "csrc/device/cuda_device.h"
#include "tests/native/side.h"
#ifndef AUTOHETE_REAL_GPU
#include "tests/native/cudart_standin.h"
#endif

namespace autohete::testing {
namespace {

#ifdef AUTOHETE_REAL_GPU
std::pair<void*, std::shared_ptr<void>> allocate(std::size_t bytes) {
  void* data = nullptr;
  if (cudaMalloc(&data, bytes) != cudaSuccess) return {nullptr, nullptr};
  return {data, std::shared_ptr<void>(data, [](void* memory) { (void)cudaFree(memory); })};
}
#else
// Of the exact size, so that the address sanitizer sees a copy that goes one byte too far.
std::pair<void*, std::shared_ptr<void>> allocate(std::size_t bytes) {
  void* data = std::malloc(bytes);
  return {data, std::shared_ptr<void>(data, std::free)};
}
#endif

class CudaSide final : public Side {
 public:
  explicit CudaSide(const SideOptions& options)
      : device_budget_(std::make_shared<Budget>(options.device_bytes)),
        host_budget_(std::make_shared<Budget>(options.host_bytes)),
        device_(make_cuda_device(kIndex)),
        store_(make_cuda_store({kIndex, allocate, device_budget_, host_budget_, options.pin,
                                [this](const std::string& text) { warnings_.push_back(text); }})) {}
  Device& device() override { return *device_; }
  Store& store() override { return *store_; }
  Budget& device_budget() override { return *device_budget_; }
  Budget& host_budget() override { return *host_budget_; }

#ifdef AUTOHETE_REAL_GPU
  static constexpr int kIndex = 0;
  bool has_controls() const override { return false; }
  void hold(CopyDirection) override { SKIP("needs the stand-in"); }
  void release(CopyDirection, std::size_t) override { SKIP("needs the stand-in"); }
  void release_all(CopyDirection) override { SKIP("needs the stand-in"); }
  void random_delays(std::uint64_t, double) override { SKIP("needs the stand-in"); }
  void fail_next_copy(CopyDirection) override { SKIP("needs the stand-in"); }
  void refuse_pinning(std::size_t) override { SKIP("needs the stand-in"); }
#else
  static constexpr int kIndex = 1;  // not the current device: a forgotten guard shows
  ~CudaSide() override {
    device_.reset();
    cudart_standin::reset();
  }
  void hold(CopyDirection direction) override { cudart_standin::hold(kind(direction)); }
  void release(CopyDirection direction, std::size_t num_copies) override {
    cudart_standin::release(kind(direction), num_copies);
  }
  void release_all(CopyDirection direction) override {
    cudart_standin::release_all(kind(direction));
  }
  void random_delays(std::uint64_t seed, double max_seconds) override {
    cudart_standin::random_delays(seed, max_seconds);
  }
  void fail_next_copy(CopyDirection) override {
    cudart_standin::fail_next("cudaMemcpyAsync", cudaErrorInvalidValue);
  }
  void refuse_pinning(std::size_t after_bytes) override {
    cudart_standin::limit_registered_bytes(after_bytes);
  }
#endif

 private:
  static cudaMemcpyKind kind(CopyDirection direction) {
    return direction == kUp ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  }
  std::shared_ptr<Budget> device_budget_, host_budget_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Store> store_;
};

}  // namespace

std::unique_ptr<Side> make_side(const SideOptions& options) {
  return std::make_unique<CudaSide>(options);
}

}  // namespace autohete::testing

int main(int argc, char** argv) {
  const int status = check::main_of_tests(argc, argv);
#ifndef AUTOHETE_REAL_GPU
  cudart_standin::reset();  // joins its threads
#endif
  return status;
}
