// What several ranks do together: gradients averaged (exchange), updated rows brought together
// (gather). Two lanes of a simulation; a single rank has no use for them.
#pragma once

#include <cstddef>
#include <deque>

#include "csrc/plan/simulated_state.h"

namespace autohete {

class SimulatedCollectives {
 public:
  explicit SimulatedCollectives(SimulatedState& state) : state_(state) {}

  // The unit's backward is over, its gradients can be averaged.
  void send(int unit) { sent_.push_back(unit); }
  bool none_sent() const { return sent_.empty(); }

  // One unit's may be on their way while the next one computes; none when backward is over.
  bool must_take_up() const { return sent_.size() > (state_.walk.after_backward() ? 0 : 1); }
  bool start_taking_up();  // on the compute lane; true when it began
  void end_taking_up();

  bool start_exchange();
  void end_exchange() { ++num_exchanged_; }

  // This rank's rows are updated, and so are the other ranks'.
  void updated(int unit);

  // All ranks gather in one order: once the step is taken smallest unit first, whatever is ready
  // first; early, the smallest one that is ready.
  bool start_gather();
  void end_gather() { ++num_gathered_; }

 private:
  void begin_gather(int unit);

  SimulatedState& state_;
  std::deque<int> sent_;           // units whose gradients are not taken up yet
  std::size_t num_exchanged_ = 0;  // of those, the first ones
  int num_gathered_ = 0;           // over all steps
  SimulatedQueue updated_;         // early: not gathered yet
};

}  // namespace autohete
