// The host side of the suites.
#include "csrc/device/host_device.h"
#include "csrc/device/host_store.h"
#include "tests/native/side.h"

namespace autohete::testing {
namespace {

class HostSide final : public Side {
 public:
  explicit HostSide(const SideOptions& options)
      : device_budget_(std::make_shared<Budget>(options.device_bytes)),
        host_budget_(std::make_shared<Budget>(options.host_bytes)),
        device_(device_budget_),
        store_({device_budget_, host_budget_, options.pin,
                [this](const std::string& text) { warnings_.push_back(text); }}) {}

  Device& device() override { return device_; }
  Store& store() override { return store_; }
  Budget& device_budget() override { return *device_budget_; }
  Budget& host_budget() override { return *host_budget_; }
  void hold(CopyDirection direction) override { device_.link(direction).hold(); }
  void release(CopyDirection direction, std::size_t num_copies) override {
    device_.link(direction).release(num_copies);
  }
  void release_all(CopyDirection direction) override { device_.link(direction).release_all(); }
  void random_delays(std::uint64_t seed, double max_seconds) override {
    device_.link(kUp).set_random_delays(seed, max_seconds);
    device_.link(kDown).set_random_delays(seed + 1, max_seconds);
  }
  void fail_next_copy(CopyDirection direction) override { device_.link(direction).fail_next(1); }
  void refuse_pinning(std::size_t after_bytes) override { store_.refuse_pinning(after_bytes); }

 private:
  std::shared_ptr<Budget> device_budget_, host_budget_;
  HostDevice device_;
  HostStore store_;
};

}  // namespace

std::unique_ptr<Side> make_side(const SideOptions& options) {
  return std::make_unique<HostSide>(options);
}

}  // namespace autohete::testing

int main(int argc, char** argv) { return check::main_of_tests(argc, argv); }
