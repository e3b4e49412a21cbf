#include "csrc/bindings/budget_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "csrc/base/format_bytes.h"

namespace autohete {
namespace {

thread_local std::shared_ptr<ActivationAccount> current_account;
thread_local bool until_backward_ends = false;
int num_forks = 0;  // between the process that installed this and the present one

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// The account to charge, or null. Forgets one whose time is over.
ActivationAccount* account_now() {
  if (!current_account) return nullptr;
  if (current_account->num_forks != num_forks) return nullptr;
  if (!current_account->open || (until_backward_ends && !in_backward())) current_account.reset();
  return current_account.get();
}

struct Charge {
  std::shared_ptr<ActivationAccount> account;
  std::size_t bytes;
};

// What is charged, by address. torch has callers (oneDNN) that free by address alone, so the charge
// cannot live in the DataPtr's context.
class Ledger {
 public:
  void add(void* data, std::shared_ptr<ActivationAccount> account, std::size_t bytes) {
    Shard& shard = shard_of(data);
    std::lock_guard lock(shard.mutex);
    shard.charges.emplace(data, Charge{std::move(account), bytes});
  }
  std::optional<Charge> remove(void* data) {
    Shard& shard = shard_of(data);
    std::lock_guard lock(shard.mutex);
    const auto found = shard.charges.find(data);
    if (found == shard.charges.end()) return std::nullopt;
    Charge charge = std::move(found->second);
    shard.charges.erase(found);
    return charge;
  }

 private:
  struct Shard {
    std::mutex mutex;
    ska::flat_hash_map<void*, Charge> charges;  // without a node to allocate for each
  };
  Shard& shard_of(void* data) {
    return shards_[(reinterpret_cast<std::uintptr_t>(data) >> 6) % shards_.size()];
  }
  std::array<Shard, 16> shards_;
};

// Who charged last. What waits for others would be held beside what this one uses.
struct LastCharged {
  std::mutex mutex;
  std::weak_ptr<ActivationAccount> account;
};

// Tensors may outlive every engine and be freed while the process ends: never destroyed. A forked
// child begins anew: another thread of the parent may have had any of the locks, and is not there
// to let go of it. What the parent charged is not counted in the child, nor are its accounts.
struct Books {
  Ledger ledger;
  LastCharged last;
};
Books* books = nullptr;

void begin_anew_in_child() {
  books = new Books;
  ++num_forks;
}

c10::Allocator* base_allocator = nullptr;

void let_others_go(const std::shared_ptr<ActivationAccount>& account) {
  std::shared_ptr<ActivationAccount> before;
  {
    std::lock_guard lock(books->last.mutex);
    before = books->last.account.lock();
    books->last.account = account;
  }
  if (before && before != account) before->cache.clear();
}

// Blocks wait in the account's cache as long as its device is there.
void free_counted(void* data) {
  const std::optional<Charge> charge = books->ledger.remove(data);
  if (!charge) return free_activation(data);  // allocated outside a scope
  ActivationAccount& account = *charge->account;
  if (charge->bytes >= BlockCache::kSmallest) {
    account.cache.put(data, charge->bytes);
    if (!account.open) account.cache.clear();
  } else {
    free_activation(data);
  }
  account.budget->refund(charge->bytes);
}

class BudgetAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0 || !account_now()) return base_allocator->allocate(bytes);
    Budget& budget = *current_account->budget;
    if (!budget.charge(bytes)) refuse(bytes, budget);
    void* data = nullptr;
    try {
      data = block_of(bytes, current_account->cache);
    } catch (...) {
      budget.refund(bytes);
      throw;
    }
    books->ledger.add(data, current_account, bytes);
    return {data, data, &free_counted, c10::Device(c10::kCPU)};
  }
  void copy_data(void* dest, const void* src, std::size_t bytes) const override {
    base_allocator->copy_data(dest, src, bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }

 private:
  static void* block_of(std::size_t bytes, BlockCache& cache) {
    if (bytes < BlockCache::kSmallest) return base_allocator->raw_allocate(bytes);
    if (void* const block = cache.take(bytes)) return block;
    void* block = nullptr;
    try {
      block = base_allocator->raw_allocate(bytes);
    } catch (const c10::Error&) {  // what waits may be what is missing
      cache.clear();
      block = base_allocator->raw_allocate(bytes);
    }
    cache.lend(bytes);
    return block;
  }
  [[noreturn]] static void refuse(std::size_t bytes, const Budget& budget) {
    const std::size_t least = budget.used() + bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "autohete host device: a tensor asked for ",
                     format_bytes(bytes), ", ", format_bytes(budget.free()), " of ",
                     format_bytes(budget.limit()), " gpu_mem were left; this step needs at least ",
                     format_bytes(least), " (gpu_mem=", least, "). ", current_account->advice);
  }
};

}  // namespace

ActivationAccount::ActivationAccount() : num_forks(autohete::num_forks) {}

void ActivationAccount::close() {
  open = false;
  if (num_forks == autohete::num_forks) cache.clear();
}

void free_activation(void* block) { base_allocator->raw_deleter()(block); }

std::shared_ptr<ActivationAccount> set_activation_account(
    std::shared_ptr<ActivationAccount> account) {
  // Installed once and for good: tensors may outlive any engine. It does nothing outside a scope.
  static std::once_flag installed;
  std::call_once(installed, [] {
    books = new Books;  // before anybody frees by way of it
    base_allocator = c10::GetCPUAllocator();
    static BudgetAllocator& allocator = *new BudgetAllocator;
    c10::SetCPUAllocator(&allocator, /*priority=*/100);
    pthread_atfork(nullptr, nullptr, &begin_anew_in_child);
  });
  if (account && account->num_forks != num_forks) account.reset();
  if (account) let_others_go(account);
  until_backward_ends = account && in_backward();
  return std::exchange(current_account, std::move(account));
}

}  // namespace autohete
