// Improves the formulation's plan by simulating plans near it. The formulation bounds a step from
// below by one-machine arguments; where they are not tight, a neighbour can be faster in truth.
#pragma once

#include <vector>

#include "csrc/plan/formulation.h"

namespace autohete {

// Hill-climbs over the counts, and over where the offloaded parameters sit, with at most
// options.max_simulations simulations, fewer of walks over very many units or micro-batches; every
// plan it tries fits the formulation's budgets. Returns the one with the shortest simulated step;
// of equal ones the first tried, so the solver's own plan with trailing offload wins ties. Where
// everything fits on the device nothing leaves it: a gain from updating on the host would rest on
// two measured rates alone. Not so of several ranks, whose gather of what the device updated
// nothing hides. Deterministic.
Plan refine(const Profile& profile, const Formulation& formulation,
            const std::vector<SegmentCounts>& counts, const PlannerOptions& options);

}  // namespace autohete
