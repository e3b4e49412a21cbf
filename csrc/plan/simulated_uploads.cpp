#include "csrc/plan/simulated_uploads.h"

#include <algorithm>

#include "csrc/base/check.h"

namespace autohete {

SimulatedUploads::SimulatedUploads(SimulatedState& state, int window) : state_(state) {
  for (const SimulatedUnit& unit : state_.units) {
    if (unit.host_parameters) slots_.push_back({unit.param_bytes, -1});
  }
  std::sort(slots_.begin(), slots_.end(),
            [](const Slot& a, const Slot& b) { return a.bytes > b.bytes; });
  slots_.resize(std::min(slots_.size(), static_cast<std::size_t>(window)));
}

bool SimulatedUploads::start() {
  if (state_.policy.synchronous_moves && state_.lanes[SimulatedLane::kCompute].busy) return false;
  const auto [after_update, first] = most_urgent();
  if (h2d().busy) {
    if (first < 0 || !state_.policy.priority_order) return false;
    return state_.distance(first) < state_.distance(h2d().unit) &&
           state_.lanes.overtake(SimulatedLane::kH2d);
  }
  if (first < 0) return false;
  SimulatedUnit& unit = state_.units[first];
  if (after_update) {
    forget_waiting(first);
  } else if (!unit.loading && !take_slot(first)) {
    return false;
  }
  const double seconds = after_update ? unit.seconds.upload_update : unit.seconds.upload;
  const double left = std::exchange(unit.up_remaining, 0);
  state_.lanes.begin(SimulatedLane::kH2d, first, "upload", left > 0 ? left : seconds,
                     seconds / unit.chunks_up);
  return true;
}

void SimulatedUploads::end(int k) {
  SimulatedUnit& unit = state_.units[k];
  if (!unit.host_parameters) {
    ++unit.uploads;
    return;
  }
  unit.loading = false;
  unit.resident = true;
}

void SimulatedUploads::stop(int k, double remaining_seconds) {
  state_.units[k].up_remaining = remaining_seconds;
  if (!state_.units[k].host_parameters) waiting_.insert({state_.key(k), k});
}

void SimulatedUploads::updated(int k) {
  SimulatedUnit& unit = state_.units[k];
  ++unit.updates;
  if (!unit.host_parameters) {
    waiting_.insert({state_.key(k), k});
    return;
  }
  drop(unit);  // the slot's bytes are old
}

void SimulatedUploads::forget_waiting(int unit) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                  [unit](const auto& entry) { return entry.second == unit; });
  AH_ASSERT(found != waiting_.end());
  waiting_.erase(found);
}

// (is it an update on its way back, unit); unit -1: nothing to do.
std::pair<bool, int> SimulatedUploads::most_urgent() const {
  const int load = next_load();
  const int update = next_update_back();
  if (load < 0 || update < 0) return {load < 0, std::max(load, update)};
  const bool update_first = state_.distance(update) <= state_.distance(load);
  return {update_first, update_first ? update : load};
}

// The first unit whose update is on its way back, of a step that has been taken.
int SimulatedUploads::next_update_back() const {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(), [this](const auto& entry) {
    return state_.may_go_up(state_.units[entry.second].updates);
  });
  return found == waiting_.end() ? -1 : found->second;
}

// The nearest unit that the window should hold, does not, and could load now.
int SimulatedUploads::next_load() const {
  if (slots_.empty()) return -1;
  if (state_.policy.synchronous_moves) return load_on_demand();
  for (const int k : wanted()) {
    if (state_.units[k].resident || is_loading_now(k) || !state_.current_on_host(k)) continue;
    return k;
  }
  return -1;
}

int SimulatedUploads::load_on_demand() const {
  if (state_.visiting() || state_.updating()) return -1;
  const int k = state_.walk.unit();
  const bool missing = state_.units[k].host_parameters && !state_.units[k].resident;
  return missing && !is_loading_now(k) && state_.current_on_host(k) ? k : -1;
}

// The units the window should hold, nearest first: the running one and the next on the walk.
std::vector<int> SimulatedUploads::wanted() const {
  const int num_units = state_.walk.num_units();
  std::vector<int> units;
  int room = static_cast<int>(slots_.size());
  const int running = state_.lanes[SimulatedLane::kCompute].unit;
  if (state_.visiting() && !state_.updating() && state_.units[running].host_parameters) --room;
  const auto [direction, position] = state_.walk.place();
  const int here = visit_index(direction, position, num_units) + (state_.waits_to_visit() ? 0 : 1);
  for (int ahead = 0; ahead < 2 * num_units && room > 0; ++ahead) {
    const int k = unit_of_visit((here + ahead) % (2 * num_units), num_units);
    if (!state_.units[k].host_parameters || state_.running(k)) continue;
    if (std::find(units.begin(), units.end(), k) != units.end()) continue;
    units.push_back(k);
    --room;
  }
  return units;
}

bool SimulatedUploads::take_slot(int k) {
  const int best = best_slot(k);
  if (best < 0) return false;
  if (slots_[best].unit >= 0) drop(state_.units[slots_[best].unit]);
  slots_[best].unit = k;
  state_.units[k].slot = best;
  state_.units[k].loading = true;
  return true;
}

// As the engine does: the smallest free slot that the unit fits in, or the one whose unit is needed
// last, if that is later than `k`. -1: none.
int SimulatedUploads::best_slot(int k) const {
  int best = -1;
  for (int i = 0; i < static_cast<int>(slots_.size()); ++i) {
    if (slots_[i].bytes < state_.units[k].param_bytes) break;  // largest first
    const int holder = slots_[i].unit;
    if (holder < 0) {
      best = i;
      continue;
    }
    if (best >= 0 && slots_[best].unit < 0) continue;
    if (state_.running(holder) || is_loading_now(holder)) continue;
    if (state_.distance(holder) <= state_.distance(k)) continue;
    if (best < 0 || state_.distance(holder) > state_.distance(slots_[best].unit)) best = i;
  }
  return best;
}

void SimulatedUploads::drop(SimulatedUnit& unit) {
  if (unit.slot >= 0) slots_[unit.slot].unit = -1;
  unit.slot = -1;
  unit.resident = unit.loading = false;
  unit.up_remaining = 0;
}

}  // namespace autohete
