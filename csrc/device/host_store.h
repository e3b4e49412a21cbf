// The host device's memory: blocks of both tiers are mapped pages, each tier with a budget.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "csrc/device/budget.h"
#include "csrc/device/host_tier.h"
#include "csrc/device/store.h"

namespace autohete {

struct HostStoreOptions {
  std::shared_ptr<Budget> device_budget;  // shared with whoever else charges device memory
  std::shared_ptr<Budget> host_budget;
  bool pin = true;  // false: behaves as if nothing were pinned
  std::function<void(const std::string&)> warn;
};

// Any thread. The host device reads all memory, so "pinned" is only a word here; refuse_pinning()
// lets tests see what happens without.
class HostStore final : public Store {
 public:
  explicit HostStore(HostStoreOptions options);

  // The budget counts exactly `bytes`. The pages are there at once, as a GPU's memory is.
  BlockPtr allocate_device(std::size_t bytes, const std::string& what) override;
  // The budget counts whole pages.
  using Store::allocate_host;
  BlockPtr allocate_host(std::size_t bytes, const std::string& what, Pages pages) override;
  bool pins_host_memory() const override { return host_.pins(); }

  const std::shared_ptr<Budget>& device_budget() const { return device_budget_; }
  const std::shared_ptr<Budget>& host_budget() const { return host_.budget(); }

  // Test controls.
  // Fills with 0xFF, which every float format reads as NaN.
  static void poison(Block& block);
  // New device blocks are poisoned from now on. (Freed ones are unmapped: reading them crashes.)
  void set_poison(bool on) { poison_ = on; }
  // Pinning is refused once more than `after_bytes` are pinned.
  void refuse_pinning(std::size_t after_bytes);
  void fail_next_allocations(Tier tier, std::size_t count);

 private:
  class CountingPinner;
  void maybe_fail(Tier tier, std::size_t bytes, const std::string& what);

  const std::shared_ptr<Budget> device_budget_;
  const std::shared_ptr<CountingPinner> pinner_;
  HostTier host_;
  std::atomic<bool> poison_{false};
  std::array<std::atomic<std::size_t>, 2> failures_{};
};

}  // namespace autohete
