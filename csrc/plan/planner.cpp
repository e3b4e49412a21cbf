#include "csrc/plan/planner.h"

#include <cmath>
#include <string>

#include "csrc/base/check.h"
#include "csrc/base/format_bytes.h"
#include "csrc/plan/cost_model.h"
#include "csrc/plan/refine.h"
#include "csrc/plan/validate.h"

namespace autohete {
namespace {

constexpr std::size_t kUnlimited = std::size_t{1} << 53;

// Smallest bytes of one memory within the other's budget; 0 when nothing fits at all.
std::size_t minimum(const Profile& profile, const Budgets& budgets, const PlannerOptions& options,
                    Goal goal) {
  const Formulation formulation = formulate(profile, budgets, options);
  const SearchResult result = search(formulation, goal, SearchLimits{});
  if (!result.found) return 0;
  const std::vector<double> values = evaluate(formulation, result.counts);
  const bool device = goal == Goal::kDeviceBytes;
  const double bytes = device ? values[formulation.device] * formulation.device_scale
                              : values[formulation.host] * formulation.host_scale;
  return static_cast<std::size_t>(std::ceil(bytes * (1 - 1e-13)));  // no byte more for rounding
}

std::string smallest(const char* name, std::size_t bytes, const char* given) {
  if (bytes == 0) return concat("no ", name, " is enough with this ", given);
  return concat("the smallest ", name, " that fits with this ", given, " is ", format_bytes(bytes),
                " (", name, "=", bytes, ")");
}

std::string budget_text(std::size_t bytes) {
  return bytes >= kUnlimited ? "not limited" : format_bytes(bytes);
}

}  // namespace

std::size_t minimum_device_bytes(const Profile& profile, std::size_t host_budget,
                                 const PlannerOptions& options) {
  validate(profile);
  return minimum(profile, {kUnlimited, host_budget}, options, Goal::kDeviceBytes);
}

std::size_t minimum_host_bytes(const Profile& profile, std::size_t device_budget,
                               const PlannerOptions& options) {
  validate(profile);
  return minimum(profile, {device_budget, kUnlimited}, options, Goal::kHostBytes);
}

void require_feasible(const Profile& profile, const Budgets& budgets,
                      const PlannerOptions& options) {
  validate(budgets);
  const std::size_t device = minimum_device_bytes(profile, budgets.host_bytes, options);
  if (device != 0 && device <= budgets.device_bytes) return;
  const std::size_t host = minimum_host_bytes(profile, budgets.device_bytes, options);
  const char* binding = device == 0 ? (host == 0 ? "gpu_mem and cpu_mem" : "cpu_mem")
                                    : (host == 0 ? "gpu_mem" : "gpu_mem or cpu_mem");
  throw InfeasibleError(
      concat("make_plan: gpu_mem is ", budget_text(budgets.device_bytes), " and cpu_mem is ",
             budget_text(budgets.host_bytes), ", expected room for a plan; ", binding,
             " must grow: ", smallest("gpu_mem", device, "cpu_mem"), ", ",
             smallest("cpu_mem", host, "gpu_mem"),
             "; raise it, or use a smaller batch or shorter sequences"),
      device, host, binding);
}

void predict_plan(const Profile& profile, Plan& plan, const SimulationPolicy& policy) {
  const Simulation simulation = simulate(profile, plan, policy);
  plan.step_seconds = simulation.step_seconds;
  plan.device_peak_bytes = largest_visit(device_visits(profile, plan, simulation.leaving_bytes));
  plan.host_bytes = host_bytes(profile, plan);
  plan.binding_lane = binding_lane(lane_seconds(profile, plan));
}

Plan finish_plan(const Profile& profile, const Formulation& formulation,
                 const std::vector<SegmentCounts>& counts, const PlannerOptions& options,
                 const std::string& solver) {
  Plan plan = refine(profile, formulation, counts, options);
  plan.solver = solver;
  SimulationPolicy policy;
  policy.gated = options.gated;
  policy.early_uploads = options.early_uploads;
  predict_plan(profile, plan, policy);
  return plan;
}

void require_within(const Profile& profile, const Plan& plan, const Budgets& budgets) {
  const std::size_t device = device_peak_bytes(profile, plan), host = host_bytes(profile, plan);
  const bool device_binds = device > budgets.device_bytes, host_binds = host > budgets.host_bytes;
  if (!device_binds && !host_binds) return;
  const char* binding = !host_binds ? "gpu_mem" : device_binds ? "gpu_mem and cpu_mem" : "cpu_mem";
  throw InfeasibleError(
      concat("make_plan: strategy '", plan.strategy, "' needs ", format_bytes(device),
             " of gpu_mem (gpu_mem=", device, ") and ", format_bytes(host),
             " of cpu_mem (cpu_mem=", host, "), gpu_mem is ", budget_text(budgets.device_bytes),
             " and cpu_mem is ", budget_text(budgets.host_bytes), "; ", binding,
             " must grow, or use strategy 'autohete' or a smaller batch"),
      device, host, binding);
}

Plan make_plan(const Profile& profile, const Budgets& budgets, const PlannerOptions& options,
               const SearchLimits& limits, bool (*interrupted)()) {
  validate(profile);
  validate(budgets);
  const Formulation formulation = formulate(profile, budgets, options);
  const SearchResult result = search(formulation, Goal::kStepSeconds, limits, interrupted);
  if (!result.found) {
    require_feasible(profile, budgets, options);
    throw std::runtime_error(
        "make_plan: the limits ended the search before a plan was found; "
        "allow more time or use the GLPK solver");
  }
  return finish_plan(profile, formulation, result.counts, options,
                     result.optimal ? "enumeration" : "enumeration, stopped at its limit");
}

}  // namespace autohete
