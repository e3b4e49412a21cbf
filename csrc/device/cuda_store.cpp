// Memory on the CUDA side: registered host pages, and device blocks from the allocator given.
#include <utility>

#include "csrc/device/cuda_check.h"
#include "csrc/device/cuda_device.h"
#include "csrc/device/host_tier.h"

namespace autohete {
namespace {

using cuda::check;
using cuda::DeviceGuard;

class CudaPinner final : public Pinner {
 public:
  explicit CudaPinner(int index) : index_(index) {}
  std::string pin(void* data, std::size_t bytes) override {
    DeviceGuard guard(index_);
    const cudaError_t error =
        cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error == cudaSuccess) return {};
    (void)cudaGetLastError();
    return cuda::describe("cudaHostRegister", error);
  }
  void unpin(void* data) override { cuda::ignore(cudaHostUnregister(data)); }

 private:
  const int index_;
};

class CudaBlock final : public Block {
 public:
  CudaBlock(void* data, std::size_t bytes, std::shared_ptr<void> owner, BudgetCharge charge)
      : Block(static_cast<std::byte*>(data), bytes, Tier::kDevice),
        charge_(std::move(charge)),
        owner_(std::move(owner)) {}

 private:
  BudgetCharge charge_;
  std::shared_ptr<void> owner_;
};

class CudaStore final : public Store {
 public:
  explicit CudaStore(CudaStoreOptions options)
      : options_(std::move(options)),
        host_(options_.host_budget,
              options_.pin ? std::make_shared<CudaPinner>(options_.index) : nullptr,
              options_.warn) {}

  BlockPtr allocate_device(std::size_t bytes, const std::string& what) override {
    BudgetCharge charge;
    if (const auto& budget = options_.device_budget) {
      charge = BudgetCharge(budget, bytes);
      if (!charge) refuse(what, bytes, budget->free(), budget->limit());
    }
    auto [data, owner] = options_.allocate_device(bytes);
    if (data) return std::make_shared<CudaBlock>(data, bytes, std::move(owner), std::move(charge));
    const auto [free_bytes, limit_bytes] = options_.device_room ? options_.device_room() : room();
    refuse(what, bytes, free_bytes, limit_bytes);
  }

  using Store::allocate_host;
  BlockPtr allocate_host(std::size_t bytes, const std::string& what, Pages pages) override {
    return host_.allocate(bytes, what, pages);
  }
  bool pins_host_memory() const override { return host_.pins(); }

 private:
  std::pair<std::size_t, std::size_t> room() const {
    DeviceGuard guard(options_.index);
    std::size_t free_bytes = 0, total_bytes = 0;
    check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    return {free_bytes, total_bytes};
  }

  [[noreturn]] static void refuse(const std::string& what, std::size_t bytes,
                                  std::size_t free_bytes, std::size_t limit_bytes) {
    throw_out_of_memory("device memory", what, bytes, free_bytes, limit_bytes,
                        "raise gpu_mem if the GPU has more, or offload more");
  }

  const CudaStoreOptions options_;
  HostTier host_;
};

}  // namespace

std::unique_ptr<Store> make_cuda_store(CudaStoreOptions options) {
  return std::make_unique<CudaStore>(std::move(options));
}

}  // namespace autohete
