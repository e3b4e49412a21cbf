// Where a simulated training is on its walk over the units: forward, backward, device updates.
//
// A step is one walk for each micro-batch, the last followed by the updates that the device makes.
// Value semantics, one thread.
#pragma once

#include <utility>
#include <vector>

#include "csrc/plan/order.h"

namespace autohete {

class SimulatedWalk {
 public:
  enum class Action { kForward, kBackward, kDeviceUpdate };

  // `device_updated`: the units that the device updates, in their order; `repeats`: micro-batches.
  SimulatedWalk(int num_units, std::vector<int> device_updated, int repeats)
      : num_units_(num_units), repeats_(repeats), device_updated_(std::move(device_updated)) {}

  int num_units() const { return num_units_; }
  int repeats() const { return repeats_; }
  int step() const { return step_; }  // taken so far
  bool last_repeat() const { return repeat_ == repeats_ - 1; }

  Action action() const {
    if (visit_ < num_units_) return Action::kForward;
    return visit_ < 2 * num_units_ ? Action::kBackward : Action::kDeviceUpdate;
  }
  int unit() const {
    if (action() == Action::kDeviceUpdate) return device_updated_[visit_ - 2 * num_units_];
    return unit_of_visit(visit_, num_units_);
  }
  bool before_step() const { return visit_ == 0 && repeat_ == 0; }
  bool after_backward() const { return visit_ == 2 * num_units_; }

  // Place on the walk for distances: during device updates, the start of the next forward.
  std::pair<Direction, int> place() const {
    if (action() == Action::kDeviceUpdate) return {Direction::kBackward, 0};
    const Direction direction =
        action() == Action::kForward ? Direction::kForward : Direction::kBackward;
    return {direction, unit()};
  }

  void next_visit() { ++visit_; }

  // Begins the next walk if this one is over; true when a step is over with it.
  bool turn() {
    if (visit_ != end_of_visits()) return false;
    visit_ = 0;
    const bool stepped = last_repeat();
    repeat_ = stepped ? 0 : repeat_ + 1;
    if (stepped) ++step_;
    return stepped;
  }

 private:
  int end_of_visits() const {
    return 2 * num_units_ + (last_repeat() ? static_cast<int>(device_updated_.size()) : 0);
  }

  int num_units_, repeats_;
  std::vector<int> device_updated_;
  int step_ = 0, repeat_ = 0, visit_ = 0;
};

}  // namespace autohete
