// What a formulation's variables are worth for given counts.
#include <algorithm>
#include <cmath>

#include "csrc/base/check.h"
#include "csrc/plan/formulation.h"

namespace autohete {
namespace {

double value_of(const Bound& bound, const std::vector<double>& values) {
  double sum = bound.constant;
  for (const Term& term : bound.terms) sum += term.coefficient * values[term.variable];
  return sum;
}

}  // namespace

std::vector<double> objective(const Formulation& formulation, Goal goal) {
  std::vector<double> cost(formulation.variables.size(), 0);
  for (int i = 0; i < formulation.num_counts(); ++i) cost[i] = formulation.tie_break;
  if (goal == Goal::kStepSeconds) cost[formulation.step] = 1;
  if (goal == Goal::kDeviceBytes) cost[formulation.device] = 1;
  if (goal == Goal::kHostBytes) cost[formulation.host] = 1;
  return cost;
}

std::vector<double> evaluate(const Formulation& formulation,
                             const std::vector<SegmentCounts>& counts) {
  AH_ASSERT(counts.size() == formulation.segments.size());
  std::vector<double> values(formulation.variables.size(), 0);
  for (std::size_t g = 0; g < counts.size(); ++g) {
    values[3 * g] = counts[g].recompute;
    values[3 * g + 1] = counts[g].parameters;
    values[3 * g + 2] = counts[g].state;
  }
  const int free = formulation.num_counts();
  for (const Bound& bound : formulation.bounds) {
    if (bound.variable < free) continue;
    double value = value_of(bound, values);
    if (formulation.variables[bound.variable].integer) value = std::ceil(value - 1e-9);
    values[bound.variable] = std::max(values[bound.variable], value);
  }
  return values;
}

bool within_budgets(const Formulation& formulation, const std::vector<double>& values) {
  const auto below = [&](int variable) {
    return values[variable] <= formulation.variables[variable].upper + 1e-13;
  };
  return below(formulation.device) && below(formulation.host);
}

std::vector<SegmentCounts> counts_of(const Formulation& formulation,
                                     const std::vector<double>& values) {
  AH_ASSERT(values.size() == formulation.variables.size());
  std::vector<SegmentCounts> counts(formulation.segments.size());
  for (std::size_t g = 0; g < counts.size(); ++g) {
    counts[g].recompute = static_cast<int>(std::lround(values[3 * g]));
    counts[g].parameters = static_cast<int>(std::lround(values[3 * g + 1]));
    counts[g].state = static_cast<int>(std::lround(values[3 * g + 2]));
  }
  return counts;
}

}  // namespace autohete
