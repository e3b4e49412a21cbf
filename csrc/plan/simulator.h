// A discrete-event simulation of training steps under a plan: what each lane does when.
//
// Four lanes (device compute, H2D, D2H, CPU) each do one thing at a time. Compute walks the units
// forward and backward; a visit waits until its unit's parameters are there and current:
//   - parameters on the host: the window holds the running unit and the next ones on the walk that
//     live on the host; the one with the nearest next use is loaded first (order.h), into a slot
//     that it fits in (engine.h: as large as the largest units);
//   - state on the host, parameters on the device: the last update has come back up.
// A backward whose gradients leave the device ends when less than three units' are leaving, and
// none of its unit's from the micro-batch before.
// Gradients leave, and updates run, smallest unit first (order.h). The next forward of a unit waits
// for that unit alone. As in the engine nothing that an update made goes up before the step's whole
// backward has ended, when step() is called. Several steps are simulated; the period of the last
// ones is the prediction.
//
// Several ranks are alike, so one is simulated, with two lanes more. In a step's last backward a
// unit's gradients are averaged (exchange) when it has left, one unit at a time; the next backward
// but one waits for them and takes them up, and backward is over when all are. A unit's other rows
// follow its update (gather), once the step is taken, smallest unit first whatever is ready, or
// early, the smallest one that is ready.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "csrc/plan/plan.h"

namespace autohete {

struct SimulationPolicy {
  bool gated = true;               // updates start when the step's whole backward has ended
  bool early_uploads = false;      // ungated: what is updated goes up at once, not from step() on
  bool priority_order = true;      // false: first in, first out on every lane
  bool iteration_barrier = false;  // the next forward waits for all updates and their uploads
  bool synchronous_moves = false;  // nothing is copied while the device computes
  bool preempt_downloads = false;  // a smaller unit's gradients overtake between chunks
  int gradient_buffers = 3;        // units whose gradients are on the device on their way out
  int steps = 6;                   // simulated; at least 3
};

enum class SimulatedLane { kCompute, kH2d, kD2h, kCpu, kExchange, kGather };
constexpr std::size_t kNumSimulatedLanes = 6;

struct SimulatedSpan {
  SimulatedLane lane;
  int unit;
  // "forward", "backward", "take up", "update", "upload", "download", "exchange", "gather", or
  // "loop": what follows a step, of no unit (the first one's number stands there)
  std::string what;
  double start_seconds;
  double end_seconds;
};

struct Simulation {
  double step_seconds = 0;        // mean period of the second half of the steps
  double first_step_seconds = 0;  // until the first step's backward has ended
  double compute_seconds = 0;     // of one step; the rest of step_seconds the device waits
  // Mean wait between the end of a step's compute (device updates included) and the first forward
  // of the next one, over the second half of the steps.
  double gap_seconds = 0;
  // By unit: the gradients of other units that are on the device, on their way out, when its
  // backward begins; the most over the second half of the steps. Copies are late now and then: a
  // tensor of what has only just left is among them.
  std::vector<std::size_t> leaving_bytes;
  std::vector<SimulatedSpan> spans;  // of all steps, in order of their ends; empty unless asked for
};

// Throws std::invalid_argument for a profile or plan that validate() refuses. Thread-safe,
// deterministic. Cost: microseconds per unit and step.
Simulation simulate(const Profile& profile, const Plan& plan, const SimulationPolicy& policy = {},
                    bool keep_spans = false);

// How the named strategy orders its work (autohete, zero_offload, patrickstar, stronghold, ...).
SimulationPolicy policy_of(const std::string& strategy);

}  // namespace autohete
