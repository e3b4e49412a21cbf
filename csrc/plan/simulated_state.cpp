#include "csrc/plan/simulated_state.h"

#include <algorithm>

namespace autohete {
namespace {

int num_chunks(std::size_t bytes, std::size_t chunk_bytes) {
  return static_cast<int>(std::max<std::size_t>(1, (bytes + chunk_bytes - 1) / chunk_bytes));
}

SimulatedUnit unit_at_rest(const Profile& profile, const Plan& plan, std::size_t i) {
  const UnitProfile& unit = profile.units[i];
  SimulatedUnit state;
  state.seconds = unit_seconds(unit, profile);
  state.host_parameters = plan.units[i].parameters == Tier::kHost && unit.param_bytes > 0;
  state.trainable = unit.grad_bytes > 0;
  state.host_state = plan.units[i].optimizer_state == Tier::kHost && state.trainable;
  const bool recompute = plan.units[i].activations == ActivationRule::kRecompute;
  state.backward = state.seconds.backward + (recompute ? state.seconds.recompute : 0);
  if (i + 1 == plan.units.size()) state.backward += profile.outside_seconds;
  state.param_bytes = unit.param_bytes;
  state.grad_bytes = unit.grad_bytes;
  state.largest_grad_tensor_bytes = unit.largest_grad_tensor_bytes;
  state.chunks_up = num_chunks(unit.param_bytes, profile.chunk_bytes);
  state.chunks_down = num_chunks(unit.grad_bytes, profile.chunk_bytes);
  return state;
}

std::vector<SimulatedUnit> units_at_rest(const Profile& profile, const Plan& plan) {
  std::vector<SimulatedUnit> units;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    units.push_back(unit_at_rest(profile, plan, i));
  }
  return units;
}

std::vector<int> updated_on(const std::vector<SimulatedUnit>& units, bool host) {
  std::vector<int> found;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (units[i].trainable && units[i].host_state == host) found.push_back(static_cast<int>(i));
  }
  return found;
}

}  // namespace

SimulatedState::SimulatedState(const Profile& profile, const Plan& plan,
                               const SimulationPolicy& order)
    : policy(order),
      exchanges(profile.ranks.num_ranks > 1),
      early_gathers(profile.ranks.early_gathers),
      units(units_at_rest(profile, plan)),
      host_updated(updated_on(units, true)),
      walk(static_cast<int>(units.size()), updated_on(units, false),
           profile.gradient_accumulation_steps),
      lanes(profile.hardware, profile.ranks) {}

int SimulatedState::distance(int unit) const {
  if (waits_to_visit() && walk.unit() == unit) return 0;
  const auto [direction, position] = walk.place();
  return next_use_distance(direction, position, unit, walk.num_units());
}

// Updates that must be done before the unit's next visit.
int SimulatedState::updates_needed(int unit) const {
  const auto [direction, position] = walk.place();
  const int next = distance(unit) + visit_index(direction, position, walk.num_units());
  const bool next_walk = next >= 2 * walk.num_units();
  return walk.step() + (next_walk && (walk.last_repeat() || updating()) ? 1 : 0);
}

bool SimulatedState::current_on_host(int unit) const {
  const int needed = updates_needed(unit);
  return may_go_up(needed) && (!units[unit].host_state || units[unit].updates >= needed);
}

}  // namespace autohete
