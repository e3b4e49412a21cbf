// What a given plan needs and how long its lanes are busy. Works for any valid plan, whoever made
// it; the planner's rows (formulation.h) are the same sums written over counts, never below these.
#pragma once

#include <cstddef>
#include <string>

#include "csrc/plan/plan.h"

namespace autohete {

// Upper bound of the device's peak, from what the engine allocates:
//   parameter blocks of units planned on the device + window slots of the largest offloaded block
//   + optimizer state and gradients of units updated on the device
//   + the three largest gradients that leave (one being computed, two leaving)
//   + saved activations: all of a kept unit's, a recomputed unit's inputs
//   + the largest temporaries of one unit, with its activations when it is recomputed
//   + fixed_device_bytes.
// A sum over things that need not coexist: safe, and exact where they do.
std::size_t device_peak_bytes(const Profile& profile, const Plan& plan);

// Pinned and ordinary host memory: state and gradients of units updated on the host, their parameter
// blocks (or the copy kept of them when only the state is offloaded), fixed_host_bytes.
std::size_t host_bytes(const Profile& profile, const Plan& plan);

// Seconds of work per step on each lane, waits not included.
struct LaneSeconds {
  double compute = 0, h2d = 0, d2h = 0, cpu = 0;
};
LaneSeconds lane_seconds(const Profile& profile, const Plan& plan);

// "compute", "h2d", "d2h" or "cpu": the busiest.
std::string binding_lane(const LaneSeconds& lanes);

}  // namespace autohete
