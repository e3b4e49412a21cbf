#include "csrc/device/host_tier.h"

#include <new>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/device/mapped_memory.h"

namespace autohete {
namespace {

class HostBlock final : public Block {
 public:
  HostBlock(BudgetCharge charge, std::unique_ptr<MappedMemory> memory, std::size_t bytes)
      : Block(memory->data(), bytes, Tier::kHost),
        charge_(std::move(charge)),
        memory_(std::move(memory)) {}
  ~HostBlock() override {
    if (pinner_) pinner_->unpin(data());
  }
  // Returns why the pages were refused, or nothing.
  std::string pin(std::shared_ptr<Pinner> pinner) {
    std::string refusal = pinner->pin(data(), memory_->mapped_bytes());
    if (refusal.empty()) pinner_ = std::move(pinner);
    return refusal;
  }

 private:
  BudgetCharge charge_;  // given back after the memory is: members die in reverse order
  std::unique_ptr<MappedMemory> memory_;
  std::shared_ptr<Pinner> pinner_;
};

}  // namespace

void throw_out_of_memory(const std::string& where, const std::string& what, std::size_t asked_bytes,
                         std::size_t free_bytes, std::size_t limit_bytes,
                         const std::string& advice) {
  throw OutOfMemory(concat(where, ": ", what, " needs ", asked_bytes, " bytes, but ", free_bytes,
                           " are left of ", limit_bytes, "; ", advice),
                    asked_bytes, free_bytes);
}

HostTier::HostTier(std::shared_ptr<Budget> budget, std::shared_ptr<Pinner> pinner,
                   std::function<void(const std::string&)> warn)
    : budget_(std::move(budget)), pinner_(std::move(pinner)), warn_(std::move(warn)) {}

BlockPtr HostTier::allocate(std::size_t bytes, const std::string& what, Pages pages) {
  const auto refuse = [&] [[noreturn]] (const char* advice) {
    throw_out_of_memory("host memory", what, bytes, budget_->free(), budget_->limit(), advice);
  };
  try {
    BudgetCharge charge(budget_, MappedMemory::rounded(bytes));
    if (!charge) refuse("raise cpu_mem or use a smaller model");
    auto memory = std::make_unique<MappedMemory>(bytes);
    if (pages == Pages::kNow) memory->make_present();
    auto block = std::make_shared<HostBlock>(std::move(charge), std::move(memory), bytes);
    if (pins()) {
      const std::string refusal = block->pin(pinner_);
      if (refusal.empty()) {
        pinned_bytes_ += bytes;
      } else {
        remember_refusal(refusal, bytes, what);
      }
    }
    return block;
  } catch (const std::bad_alloc&) {
    refuse("the operating system has no more: free memory, or lower cpu_mem to what there is");
  }
}

void HostTier::remember_refusal(const std::string& reason, std::size_t bytes,
                                const std::string& what) {
  if (refused_.exchange(true) || !warn_) return;
  warn_(concat(
      "pinned host memory: ", bytes, " bytes for ", what, " were refused (", reason, "; ",
      pinned_bytes_.load(),
      " bytes pinned so far); going on with pageable memory, which copies slower and "
      "which the device cannot read. Raise the limit on locked memory (ulimit -l) to get it back"));
}

}  // namespace autohete
