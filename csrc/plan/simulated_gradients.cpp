#include "csrc/plan/simulated_gradients.h"

#include <utility>

namespace autohete {

void SimulatedGradients::ready(int k) {
  SimulatedUnit& unit = state_.units[k];
  if (!unit.host_state) return;
  if (std::exchange(unit.leaving, true)) {
    unit.ready_again = true;
    ++num_ready_again_;
    return;
  }
  ++leaving_;
  waiting_.insert({state_.key(k), k});
}

bool SimulatedGradients::start_download() {
  if (d2h().busy) {
    return state_.policy.preempt_downloads && !waiting_.empty() &&
           waiting_.begin()->first < state_.key(d2h().unit) &&
           state_.lanes.overtake(SimulatedLane::kD2h);
  }
  if (waiting_.empty()) return false;
  if (state_.policy.synchronous_moves && state_.lanes[SimulatedLane::kCompute].busy) return false;
  const int k = waiting_.begin()->second;
  waiting_.erase(waiting_.begin());
  SimulatedUnit& unit = state_.units[k];
  const double left = std::exchange(unit.down_remaining, 0);
  const double seconds = unit.seconds.download;
  state_.lanes.begin(SimulatedLane::kD2h, k, "download", left > 0 ? left : seconds,
                     seconds / unit.chunks_down);
  return true;
}

void SimulatedGradients::end_download(int k) {
  --leaving_;
  last_ = k;
  last_left_ = state_.lanes.now();
  // Of the step's last micro-batch: complete, so its update may run.
  SimulatedUnit& unit = state_.units[k];
  if (++unit.downloads % state_.walk.repeats() == 0) arrived_.insert({state_.key(k), k});
  unit.leaving = false;
  if (!std::exchange(unit.ready_again, false)) return;
  --num_ready_again_;
  ready(k);
}

void SimulatedGradients::stop_download(int k, double remaining_seconds) {
  state_.units[k].down_remaining = remaining_seconds;
  waiting_.insert({state_.key(k), k});
}

// Those behind the gate stand aside until it opens again: it may be every unit, at every event.
bool SimulatedGradients::start_update() {
  if (std::exchange(gates_seen_, state_.gates_open) < state_.gates_open) {
    arrived_.merge(gated_);
  }
  if (state_.lanes[SimulatedLane::kCpu].busy) return false;
  while (!arrived_.empty()) {
    const auto entry = arrived_.extract(arrived_.begin());
    const int k = entry.value().second;
    if (state_.policy.gated && state_.units[k].own_updates >= state_.gates_open) {
      gated_.insert(entry.value());
      continue;
    }
    state_.lanes.begin(SimulatedLane::kCpu, k, "update", state_.units[k].seconds.cpu_update);
    return true;
  }
  return false;
}

// The unit's own, of the micro-batch before, are those that this backward adds to.
std::size_t SimulatedGradients::leaving_bytes(int running) const {
  std::size_t bytes = late_bytes(running);
  if (d2h().busy && d2h().unit != running) bytes += state_.units[d2h().unit].grad_bytes;
  for (const auto& [key, k] : waiting_) bytes += k == running ? 0 : state_.units[k].grad_bytes;
  return bytes;
}

// A copy takes half as long again now and then; its last tensor is still there meanwhile. One of an
// earlier walk is none that is late: a forward has come between.
std::size_t SimulatedGradients::late_bytes(int running) const {
  const bool is_room = leaving_ + 1 < state_.policy.gradient_buffers;
  if (last_ <= running || !is_room) return 0;
  const SimulatedUnit& unit = state_.units[last_];
  if (unit.leaving) return 0;  // again, and counted as that
  const bool may_be_late = state_.lanes.now() - last_left_ < unit.seconds.download / 2;
  return may_be_late ? unit.largest_grad_tensor_bytes : 0;
}

}  // namespace autohete
