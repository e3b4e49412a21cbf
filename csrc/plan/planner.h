// From profile and budgets to a plan. The pieces: formulate() states the problem, search() or GLPK
// (planner_glpk.cpp, a module of its own) solves it, finish_plan() turns counts into a plan with
// its predictions. make_plan() puts them together with the built-in search.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "csrc/plan/formulation.h"
#include "csrc/plan/plan.h"
#include "csrc/plan/search.h"
#include "csrc/plan/simulator.h"

namespace autohete {

// No placement fits. Becomes autohete.InfeasibleError (a ValueError) in Python.
class InfeasibleError : public std::invalid_argument {
 public:
  InfeasibleError(const std::string& message, std::size_t smallest_device,
                  std::size_t smallest_host, std::string binds)
      : std::invalid_argument(message),
        smallest_device_bytes(smallest_device),
        smallest_host_bytes(smallest_host),
        binding(std::move(binds)) {}
  std::size_t smallest_device_bytes;  // with the given host budget; 0: none is enough
  std::size_t smallest_host_bytes;    // with the given device budget; 0: none is enough
  std::string binding;  // "gpu_mem", "cpu_mem", "gpu_mem or cpu_mem", "gpu_mem and cpu_mem"
};

// Smallest device (host) bytes for which a plan exists within the other budget; 0 when none does.
std::size_t minimum_device_bytes(const Profile& profile, std::size_t host_budget,
                                 const PlannerOptions& options);
std::size_t minimum_host_bytes(const Profile& profile, std::size_t device_budget,
                               const PlannerOptions& options);

// Throws InfeasibleError when no placement fits; returns when some does.
void require_feasible(const Profile& profile, const Budgets& budgets,
                      const PlannerOptions& options);

// Fills the plan's predictions: simulated step time, peak, host bytes, lane that binds.
void predict_plan(const Profile& profile, Plan& plan, const SimulationPolicy& policy);

// Counts -> plan, refined by simulation (refine.h) and with its predictions.
Plan finish_plan(const Profile& profile, const Formulation& formulation,
                 const std::vector<SegmentCounts>& counts, const PlannerOptions& options,
                 const std::string& solver);

// Throws the InfeasibleError for a fixed placement (a strategy's) that needs more than the budgets.
void require_within(const Profile& profile, const Plan& plan, const Budgets& budgets);

// Validates, formulates, searches. Throws InfeasibleError; std::runtime_error when the limits ended
// the search before any plan was found. Cost: see search.h.
Plan make_plan(const Profile& profile, const Budgets& budgets, const PlannerOptions& options,
               const SearchLimits& limits, bool (*interrupted)() = nullptr);

}  // namespace autohete
