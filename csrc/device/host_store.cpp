#include "csrc/device/host_store.h"

#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/device/mapped_memory.h"

namespace autohete {
namespace {

class DeviceBlock final : public Block {
 public:
  DeviceBlock(BudgetCharge charge, std::unique_ptr<MappedMemory> memory, std::size_t bytes)
      : Block(memory->data(), bytes, Tier::kDevice),
        charge_(std::move(charge)),
        memory_(std::move(memory)) {}

 private:
  BudgetCharge charge_;
  std::unique_ptr<MappedMemory> memory_;
};

}  // namespace

// Counts pinned bytes and refuses past a limit; pins nothing.
class HostStore::CountingPinner final : public Pinner {
 public:
  std::string pin(void*, std::size_t bytes) override {
    if (pinned_ + bytes > limit_) return concat("limit of ", limit_.load(), " bytes reached");
    pinned_ += bytes;
    return {};
  }
  void unpin(void*) override {}
  void set_limit(std::size_t bytes) { limit_ = bytes; }

 private:
  std::atomic<std::size_t> limit_{std::numeric_limits<std::size_t>::max()};
  std::atomic<std::size_t> pinned_{0};
};

HostStore::HostStore(HostStoreOptions options)
    : device_budget_(std::move(options.device_budget)),
      pinner_(options.pin ? std::make_shared<CountingPinner>() : nullptr),
      host_(std::move(options.host_budget), pinner_, std::move(options.warn)) {}

BlockPtr HostStore::allocate_device(std::size_t bytes, const std::string& what) {
  maybe_fail(Tier::kDevice, bytes, what);
  BudgetCharge charge(device_budget_, bytes);
  if (!charge) {
    throw_out_of_memory("device memory", what, bytes, device_budget_->free(),
                        device_budget_->limit(), "raise gpu_mem or offload more");
  }
  try {
    auto memory = std::make_unique<MappedMemory>(bytes);
    memory->make_present();
    auto block = std::make_shared<DeviceBlock>(std::move(charge), std::move(memory), bytes);
    if (poison_) poison(*block);
    return block;
  } catch (const std::bad_alloc&) {
    throw_out_of_memory("device memory", what, bytes, 0, device_budget_->limit(),
                        "the operating system has no more: the host device lives in its memory");
  }
}

BlockPtr HostStore::allocate_host(std::size_t bytes, const std::string& what, Pages pages) {
  maybe_fail(Tier::kHost, bytes, what);
  return host_.allocate(bytes, what, pages);
}

void HostStore::poison(Block& block) { std::memset(block.data(), 0xFF, block.bytes()); }

void HostStore::refuse_pinning(std::size_t after_bytes) {
  if (pinner_) pinner_->set_limit(after_bytes);
}

void HostStore::fail_next_allocations(Tier tier, std::size_t count) {
  failures_[static_cast<std::size_t>(tier)] = count;
}

void HostStore::maybe_fail(Tier tier, std::size_t bytes, const std::string& what) {
  std::atomic<std::size_t>& left = failures_[static_cast<std::size_t>(tier)];
  std::size_t count = left;
  while (count > 0 && !left.compare_exchange_weak(count, count - 1)) {
  }
  if (count == 0) return;
  const Budget& budget = tier == Tier::kDevice ? *device_budget_ : *host_.budget();
  throw_out_of_memory(tier == Tier::kDevice ? "device memory" : "host memory", what, bytes,
                      budget.free(), budget.limit(), "(a failure was injected)");
}

}  // namespace autohete
