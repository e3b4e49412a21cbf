// Charges what torch allocates on the CPU to the host device's budget, so that activations,
// temporaries and fresh gradients count as device memory there.
//
// It stands in front of torch's CPU allocator from the first use on, and passes requests through
// unless the calling thread is inside a scope. An allocation past the budget throws
// c10::OutOfMemoryError (torch.OutOfMemoryError).
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "csrc/device/budget.h"
#include "csrc/memory/block_cache.h"

namespace autohete {

// Gives a block that torch's own CPU allocator made back to it.
void free_activation(void* block);

// What a scope charges. `advice` ends the error message (what to do about it). Nothing is charged
// any more, and nothing waits to be used again, once it is not `open`.
struct ActivationAccount {
  ActivationAccount();
  void close();

  std::shared_ptr<Budget> budget;
  std::string advice;
  std::atomic<bool> open{true};
  BlockCache cache{&free_activation};
  const int num_forks;  // of this process when it was made: a child's own are others
};

// Charges this thread's later CPU allocations to `account`; null ends it. Returns the previous one.
// Begun inside a backward pass, it ends with that pass, also with one that an exception ended.
std::shared_ptr<ActivationAccount> set_activation_account(
    std::shared_ptr<ActivationAccount> account);

}  // namespace autohete
