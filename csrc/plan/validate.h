// Checks at the border: what enters the planner is finite, in range and complete.
#pragma once

#include "csrc/plan/plan.h"

namespace autohete {

// Throws std::invalid_argument naming the first field that is NaN, infinite, negative, zero where a
// rate is needed, or so large that sums would lose exactness (2^53 bytes a unit).
void validate(const Profile& profile);
void validate(const HardwareProfile& hardware);
void validate(const Budgets& budgets);

// The plan has one entry per unit, host parameters only with host state, gradients where the state
// is, and only what the units allow.
void validate(const Profile& profile, const Plan& plan);

}  // namespace autohete
