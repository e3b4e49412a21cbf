// Charges what torch allocates on the CPU to the host device's budget, so that activations,
// temporaries and fresh gradients count as device memory there.
//
// It stands in front of torch's CPU allocator from the first use on, and passes requests through
// unless the calling thread is inside a scope. An allocation past the budget throws
// c10::OutOfMemoryError (torch.OutOfMemoryError).
#pragma once

#include <memory>
#include <string>

#include "csrc/device/budget.h"

namespace autohete {

// What a scope charges. `advice` ends the error message (what to do about it).
struct ActivationAccount {
  std::shared_ptr<Budget> budget;
  std::string advice;
};

// Charges this thread's later CPU allocations to `account`; null ends it. Returns the previous one.
std::shared_ptr<ActivationAccount> set_activation_account(
    std::shared_ptr<ActivationAccount> account);

}  // namespace autohete
