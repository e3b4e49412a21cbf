// Parameters on their way up: into slots for units that live on the host, or back after an update
// for those that live on the device. The H2D lane of a simulation.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "csrc/plan/simulated_state.h"

namespace autohete {

class SimulatedUploads {
 public:
  // `window`: slots at most.
  SimulatedUploads(SimulatedState& state, int window);

  bool start();        // true when something began
  void end(int unit);  // its upload has arrived

  // Its upload was overtaken, with so much of it left.
  void stop(int unit, double remaining_seconds);

  // The unit has been updated on the host, on all ranks.
  void updated(int unit);

  // Some update is on its way back, of a step that has been taken.
  bool has_update_back() const { return next_update_back() >= 0; }

 private:
  struct Slot {
    std::size_t bytes;
    int unit;  // -1: free
  };

  const LaneWork& h2d() const { return state_.lanes[SimulatedLane::kH2d]; }
  bool is_loading_now(int unit) const { return h2d().busy && h2d().unit == unit; }
  std::pair<bool, int> most_urgent() const;
  int next_update_back() const;
  int next_load() const;
  int load_on_demand() const;
  std::vector<int> wanted() const;
  bool take_slot(int unit);
  int best_slot(int unit) const;
  void drop(SimulatedUnit& unit);
  void forget_waiting(int unit);

  SimulatedState& state_;
  std::vector<Slot> slots_;  // as large as the largest units that live on the host, largest first
  SimulatedQueue waiting_;   // updates on their way back
};

}  // namespace autohete
