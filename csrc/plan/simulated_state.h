// What the parts of a simulation share: the units, the walk over them, the lanes, and the few
// questions that several parts ask. The parts are collectives, gradients and uploads
// (simulated_*.h); compute and the loop of events are simulator.cpp.
#pragma once

#include <cstddef>
#include <set>
#include <utility>
#include <vector>

#include "csrc/plan/lanes.h"
#include "csrc/plan/order.h"
#include "csrc/plan/plan.h"
#include "csrc/plan/segments.h"
#include "csrc/plan/simulated_walk.h"
#include "csrc/plan/simulator.h"

namespace autohete {

// Where a unit stands.
struct SimulatedUnit {
  UnitSeconds seconds;
  bool host_parameters = false;
  bool host_state = false;
  bool trainable = false;
  double backward = 0;  // recomputed forward included, and the loss in the last unit's
  std::size_t param_bytes = 0;
  std::size_t grad_bytes = 0;
  std::size_t largest_grad_tensor_bytes = 0;  // of one tensor
  std::size_t others_leaving = 0;             // when a backward began
  int chunks_up = 1;
  int chunks_down = 1;
  bool leaving = false;      // its gradients are on their way down
  bool ready_again = false;  // and the next micro-batch's wait for that
  int downloads = 0;         // finished
  int updates = 0;           // on the CPU, finished
  int uploads = 0;           // after an update, finished
  int slot = -1;             // its bytes are there, or on their way
  bool resident = false;     // in a slot, current
  bool loading = false;      // in a slot, on its way
  int own_updates = 0;       // of this rank's rows; one rank: as updates
  double up_remaining = 0;   // of an overtaken copy; 0: none
  double down_remaining = 0;
};

// Ready work of one kind, by priority; equal keys cannot happen.
using SimulatedQueue = std::set<std::pair<long long, int>>;  // (key, unit)

class SimulatedState {
 public:
  SimulatedState(const Profile& profile, const Plan& plan, const SimulationPolicy& order);

  // What compute is busy with is a unit of the walk, not gradients being taken up or the loop.
  bool visiting() const { return lanes[SimulatedLane::kCompute].busy && !taking_up && !looping; }
  bool running(int unit) const { return visiting() && lanes[SimulatedLane::kCompute].unit == unit; }
  bool updating() const { return walk.action() == SimulatedWalk::Action::kDeviceUpdate; }
  bool waits_to_visit() const { return !visiting() && !held && !updating(); }

  // Visits until the unit is next needed; the visit that is waiting to start counts as 0.
  int distance(int unit) const;

  // What the given number of updates made may leave the host: the step has been taken.
  bool may_go_up(int updates) const { return policy.early_uploads || updates <= gates_open; }

  // The unit's bytes on the host are those that its next visit needs.
  bool current_on_host(int unit) const;

  // Forward: the unit's own updates of all earlier steps have come back.
  bool fresh(const SimulatedUnit& unit) const {
    if (!unit.host_state) return true;
    return (unit.host_parameters ? unit.updates : unit.uploads) >= walk.step();
  }

  // A queue's key: smallest unit first, or first come first served.
  long long key(int unit) {
    return policy.priority_order ? static_cast<long long>(gradient_priority(unit)) : ++arrivals_;
  }

  const SimulationPolicy policy;
  const bool exchanges;      // there are several ranks
  const bool early_gathers;  // see RankProfile
  std::vector<SimulatedUnit> units;
  std::vector<int> host_updated;
  SimulatedWalk walk;
  Lanes lanes;
  int gates_open = 0;      // steps whose updates may start
  bool held = false;       // a backward has ended, and waits until gradients have left
  bool taking_up = false;  // what compute is busy with
  bool looping = false;    // likewise, or about to

 private:
  int updates_needed(int unit) const;

  long long arrivals_ = 0;
};

}  // namespace autohete
