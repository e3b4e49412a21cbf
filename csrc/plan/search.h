// Exact search for the best counts, without a solver library: boxes of counts are bounded by
// interval arithmetic over the formulation's rows, the most promising box is halved first, and a
// box that cannot beat the best point found is dropped. It visits every point it cannot exclude, so
// the result is the optimum of the very objective that GLPK gets, unless a limit stopped it.
//
// Cost: milliseconds for one run of layers between an embedding and a head; grows quickly with the
// number of different runs (use GLPK there). Deterministic: ties go to the box made first.
#pragma once

#include <vector>

#include "csrc/plan/formulation.h"

namespace autohete {

struct SearchLimits {
  double seconds = 10;
  long long boxes = 2'000'000;
};

struct SearchResult {
  bool found = false;    // some counts satisfy the budgets
  bool optimal = false;  // nothing was left unexplored
  std::vector<SegmentCounts> counts;
  double objective = 0;
  long long boxes = 0;
};

// Thread-safe. Calls `interrupted` now and then and stops when it says so (Ctrl-C).
SearchResult search(const Formulation& formulation, Goal goal, const SearchLimits& limits,
                    bool (*interrupted)() = nullptr);

}  // namespace autohete
