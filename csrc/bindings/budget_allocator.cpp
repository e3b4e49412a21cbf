#include "csrc/bindings/budget_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

namespace autohete {
namespace {

thread_local std::shared_ptr<ActivationAccount> current_account;

// What a counted DataPtr owns.
struct Charge {
  c10::DataPtr memory;
  std::shared_ptr<ActivationAccount> account;
  std::size_t bytes;
  Charge(std::shared_ptr<ActivationAccount> payer, std::size_t size)
      : account(std::move(payer)), bytes(size) {}
  ~Charge() {
    memory.clear();
    account->budget->refund(bytes);
  }
};

void drop_charge(void* context) { delete static_cast<Charge*>(context); }

class BudgetAllocator final : public c10::Allocator {
 public:
  explicit BudgetAllocator(c10::Allocator* base) : base_(base) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (!current_account || bytes == 0) return base_->allocate(bytes);
    Budget& budget = *current_account->budget;
    if (!budget.charge(bytes)) refuse(bytes, budget);
    auto charge = std::make_unique<Charge>(current_account, bytes);
    charge->memory = base_->allocate(bytes);
    void* data = charge->memory.get();
    const c10::Device device = charge->memory.device();
    return {data, charge.release(), &drop_charge, device};
  }
  void copy_data(void* dest, const void* src, std::size_t bytes) const override {
    base_->copy_data(dest, src, bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return current_account ? nullptr : base_->raw_deleter();
  }

 private:
  [[noreturn]] static void refuse(std::size_t bytes, const Budget& budget) {
    constexpr double kMiB = 1 << 20;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "autohete host device: a tensor asked for ",
                     bytes / kMiB, " MiB, ", budget.free() / kMiB, " MiB of gpu_mem=",
                     budget.limit() / kMiB, " MiB were left; this step needs at least gpu_mem=",
                     budget.used() + bytes, " bytes. ", current_account->advice);
  }
  c10::Allocator* base_;
};

}  // namespace

std::shared_ptr<ActivationAccount> set_activation_account(
    std::shared_ptr<ActivationAccount> account) {
  // Installed once and for good: tensors may outlive any engine. It does nothing outside a scope.
  static std::once_flag installed;
  std::call_once(installed, [] {
    static BudgetAllocator allocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(&allocator, /*priority=*/100);
  });
  return std::exchange(current_account, std::move(account));
}

}  // namespace autohete
