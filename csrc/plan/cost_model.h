// What a given plan needs and how long its lanes are busy. Works for any valid plan, whoever made
// it; the planner's rows (formulation.h) are the same sums written over counts, never below these.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "csrc/plan/plan.h"

namespace autohete {

// Upper bound of the device's peak, from what the engine allocates. There always:
//   parameter blocks of units planned on the device + the window's slots: as large as the largest,
//   the second largest, ... offloaded block
//   + optimizer state (and, where they persist, gradients) of units updated on the device
//   + fixed_device_bytes.
// On top, the largest over the visits of backward: what earlier units saved, all the running
// unit's activations, temporaries and gradients, device gradients that have appeared, and of those
// that go to the host the two largest of the units whose backward is over: with several
// micro-batches of all units, as those of the one before may be leaving.
std::size_t device_peak_bytes(const Profile& profile, const Plan& plan);

// The same walk, visit by visit: every unit's forward in order, then every backward in reverse.
// The largest is device_peak_bytes().
struct DeviceVisit {
  int unit;
  bool backward;
  std::size_t bytes;  // on the device while the unit runs
};
std::vector<DeviceVisit> device_visits(const Profile& profile, const Plan& plan);
// With the bytes of other units' gradients that are leaving while each unit runs as they were seen
// (Simulation::leaving_bytes), in place of the bound.
std::vector<DeviceVisit> device_visits(const Profile& profile, const Plan& plan,
                                       const std::vector<std::size_t>& leaving);
std::size_t largest_visit(const std::vector<DeviceVisit>& visits);

// Pinned and ordinary host memory: state and gradients of units updated on the host, their
// parameter blocks (or the copy kept of them when only the state is offloaded), a second copy of
// state and parameters where updates are speculated, fixed_host_bytes.
std::size_t host_bytes(const Profile& profile, const Plan& plan);

// Seconds of work per step on each lane, waits not included: what the window holds where the walk
// turns is not uploaded again. Never more than a simulated step, but for rounding.
struct LaneSeconds {
  double compute = 0, h2d = 0, d2h = 0, cpu = 0, exchange = 0, gather = 0;
};
LaneSeconds lane_seconds(const Profile& profile, const Plan& plan);

// "compute", "h2d", "d2h", "cpu", "exchange" or "gather": the busiest.
std::string binding_lane(const LaneSeconds& lanes);

}  // namespace autohete
