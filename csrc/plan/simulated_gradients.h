// Gradients on their way down, and the updates that they are for: the D2H and CPU lanes of a
// simulation.
#pragma once

#include <cstddef>

#include "csrc/plan/simulated_state.h"

namespace autohete {

class SimulatedGradients {
 public:
  explicit SimulatedGradients(SimulatedState& state) : state_(state) {}

  // The unit's gradients are on the device, complete. Where those of the micro-batch before have
  // not left yet, they are added to and go again: until then full() says true.
  void ready(int unit);

  bool start_download();        // true when something began
  void end_download(int unit);  // its gradients are on the host

  // They were overtaken, with so much of the copy left.
  void stop_download(int unit, double remaining_seconds);

  bool start_update();

  // As many units' gradients are on the device on their way out as may be.
  bool full() const { return leaving_ >= state_.policy.gradient_buffers || num_ready_again_ > 0; }
  bool none_waits() const { return waiting_.empty(); }
  std::size_t leaving_bytes(int running) const;  // of other units than the one that begins

 private:
  const LaneWork& d2h() const { return state_.lanes[SimulatedLane::kD2h]; }
  std::size_t late_bytes(int running) const;

  SimulatedState& state_;
  int leaving_ = 0;  // gradients computed and not yet on the host
  int num_ready_again_ = 0;
  int last_ = -1;  // the last unit whose gradients left, and when they had
  double last_left_ = 0;
  SimulatedQueue waiting_, arrived_;
  SimulatedQueue gated_;  // arrived, for a step that has not been taken
  int gates_seen_ = 0;
};

}  // namespace autohete
