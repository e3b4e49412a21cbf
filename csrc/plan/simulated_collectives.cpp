#include "csrc/plan/simulated_collectives.h"

namespace autohete {

bool SimulatedCollectives::start_taking_up() {
  if (num_exchanged_ == 0) return false;
  state_.taking_up = true;
  const int k = sent_.front();
  state_.lanes.begin(SimulatedLane::kCompute, k, "take up", state_.units[k].seconds.pack);
  return true;
}

void SimulatedCollectives::end_taking_up() {
  state_.taking_up = false;
  sent_.pop_front();
  --num_exchanged_;
}

bool SimulatedCollectives::start_exchange() {
  if (state_.lanes[SimulatedLane::kExchange].busy || sent_.size() == num_exchanged_) return false;
  const int k = sent_[num_exchanged_];
  state_.lanes.begin(SimulatedLane::kExchange, k, "exchange", state_.units[k].seconds.exchange);
  return true;
}

void SimulatedCollectives::updated(int unit) {
  if (state_.early_gathers) updated_.insert({state_.key(unit), unit});
}

bool SimulatedCollectives::start_gather() {
  const auto& units = state_.host_updated;
  if (!state_.exchanges || units.empty() || state_.lanes[SimulatedLane::kGather].busy) return false;
  if (state_.early_gathers) {
    if (updated_.empty()) return false;
    begin_gather(updated_.extract(updated_.begin()).value().second);
    return true;
  }
  const int k = units[num_gathered_ % units.size()];
  const int step = num_gathered_ / static_cast<int>(units.size());
  if (step >= state_.gates_open || state_.units[k].own_updates <= step) return false;
  begin_gather(k);
  return true;
}

void SimulatedCollectives::begin_gather(int k) {
  state_.lanes.begin(SimulatedLane::kGather, k, "gather", state_.units[k].seconds.gather);
}

}  // namespace autohete
