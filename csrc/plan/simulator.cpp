// The compute lane and the loop of events. The other lanes are simulated_*.h; what lanes do with
// time is lanes.h.
#include "csrc/plan/simulator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/plan/simulated_collectives.h"
#include "csrc/plan/simulated_gradients.h"
#include "csrc/plan/simulated_state.h"
#include "csrc/plan/simulated_uploads.h"
#include "csrc/plan/validate.h"

namespace autohete {
namespace {

using Action = SimulatedWalk::Action;

class Simulator {
 public:
  Simulator(const Profile& profile, const Plan& plan, const SimulationPolicy& policy, bool keep)
      : keep_(keep),
        loop_seconds_(profile.loop_seconds),
        state_(profile, plan, policy),
        uploads_(state_, plan.window),
        gradients_(state_),
        collectives_(state_) {}

  Simulation run() {
    while (!over()) {
      while (start_something()) {
      }
      advance();
    }
    return result();
  }

 private:
  bool over() const { return walk().step() >= state_.policy.steps; }
  const SimulatedWalk& walk() const { return state_.walk; }
  const LaneWork& compute() const { return state_.lanes[SimulatedLane::kCompute]; }

  // ---- what compute waits for
  bool may_visit() const {
    if (state_.held) return false;
    if (walk().action() == Action::kDeviceUpdate) return true;
    const SimulatedUnit& unit = state_.units[walk().unit()];
    if (state_.policy.synchronous_moves && copies_pending()) return false;
    if (state_.policy.iteration_barrier && walk().before_step() && !all_updated()) return false;
    if (unit.host_parameters && !unit.resident) return false;
    return walk().action() == Action::kBackward || state_.fresh(unit);
  }
  bool copies_pending() const {
    return state_.lanes[SimulatedLane::kH2d].busy || state_.lanes[SimulatedLane::kD2h].busy ||
           !gradients_.none_waits() || uploads_.has_update_back();
  }
  bool all_updated() const {
    return std::all_of(state_.units.begin(), state_.units.end(),
                       [this](const SimulatedUnit& unit) { return state_.fresh(unit); });
  }

  // ---- compute lane
  bool start_compute() {
    if (compute().busy || over()) return false;
    if (state_.looping) {
      state_.lanes.begin(SimulatedLane::kCompute, 0, "loop", loop_seconds_);
      return true;
    }
    if (!state_.held && collectives_.must_take_up()) return collectives_.start_taking_up();
    if (!may_visit()) return false;
    SimulatedUnit& unit = state_.units[walk().unit()];
    switch (walk().action()) {
      case Action::kForward:
        if (walk().before_step() && walk().step() > 0)
          gaps_.push_back(state_.lanes.now() - step_ended_);
        visit("forward", unit.seconds.forward);
        break;
      case Action::kBackward:
        note_leaving(unit);
        visit("backward", unit.backward + (walk().last_repeat() ? unit.seconds.pack : 0));
        break;
      case Action::kDeviceUpdate:
        visit("update", unit.seconds.device_update);
    }
    return true;
  }
  void visit(const char* what, double seconds) {
    state_.lanes.begin(SimulatedLane::kCompute, walk().unit(), what, seconds);
  }
  void note_leaving(SimulatedUnit& running) const {
    if (walk().step() < state_.policy.steps / 2) return;
    const std::size_t bytes = gradients_.leaving_bytes(walk().unit());
    running.others_leaving = std::max(running.others_leaving, bytes);
  }

  void end_compute(int k) {
    if (state_.looping) return end_loop();
    if (state_.taking_up) return end_taking_up(k);
    if (walk().action() == Action::kBackward) {
      if (state_.exchanges && walk().last_repeat() && state_.units[k].trainable) {
        collectives_.send(k);
      } else {
        gradients_.ready(k);
      }
    }
    state_.held = gradients_.full();
    if (!state_.held) end_visit();
  }
  void end_taking_up(int k) {
    collectives_.end_taking_up();
    gradients_.ready(k);
    if (walk().after_backward() && collectives_.none_sent()) end_of_backward();
  }
  void end_visit() {
    state_.walk.next_visit();
    if (!walk().after_backward()) return turn();
    if (collectives_.none_sent()) end_of_backward();
  }
  void end_of_backward() {
    if (walk().last_repeat()) {
      state_.gates_open = walk().step() + 1;
      backward_ends_.push_back(state_.lanes.now());
    }
    turn();
  }
  void turn() {
    if (!state_.walk.turn()) return;
    step_ended_ = state_.lanes.now();
    state_.looping = loop_seconds_ > 0;
  }
  void end_loop() {
    state_.looping = false;
    step_ended_ = state_.lanes.now();
  }

  // ---- the other lanes' ends
  void end_download(int k) {
    gradients_.end_download(k);
    if (!state_.held || gradients_.full()) return;
    state_.held = false;
    end_visit();
  }
  void end_update(int k) {
    ++state_.units[k].own_updates;
    if (!state_.exchanges) return uploads_.updated(k);
    collectives_.updated(k);
  }
  void end_gather(int k) {
    collectives_.end_gather();
    uploads_.updated(k);
  }

  // ---- events
  bool start_something() {
    const bool computed = start_compute(), downloaded = gradients_.start_download();
    const bool updated = gradients_.start_update(), uploaded = uploads_.start();
    const bool exchanged = collectives_.start_exchange(), gathered = collectives_.start_gather();
    return computed || downloaded || updated || uploaded || exchanged || gathered;
  }

  // Moves time to the next end of anything.
  void advance() {
    for (const SimulatedLane lane : state_.lanes.advance()) {
      const LaneWork was = state_.lanes[lane];
      if (keep_) spans_.push_back({lane, was.unit, was.what, was.start, state_.lanes.now()});
      if (was.remaining > 0) {
        put_back(lane, was);
      } else {
        end(lane, was.unit);
      }
    }
  }
  void end(SimulatedLane lane, int unit) {
    switch (lane) {
      case SimulatedLane::kCompute:
        return end_compute(unit);
      case SimulatedLane::kH2d:
        return uploads_.end(unit);
      case SimulatedLane::kD2h:
        return end_download(unit);
      case SimulatedLane::kCpu:
        return end_update(unit);
      case SimulatedLane::kExchange:
        return collectives_.end_exchange();
      case SimulatedLane::kGather:
        return end_gather(unit);
    }
  }
  // An overtaken copy keeps what it has moved.
  void put_back(SimulatedLane lane, const LaneWork& was) {
    if (lane == SimulatedLane::kH2d) {
      uploads_.stop(was.unit, was.remaining);
    } else {
      gradients_.stop_download(was.unit, was.remaining);
    }
  }

  // ---- the outcome
  static double mean_of_second_half(const std::vector<double>& values) {
    const auto half = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    return std::accumulate(half, values.end(), 0.0) / static_cast<double>(values.end() - half);
  }

  Simulation result() {
    Simulation out;
    const std::size_t steps = backward_ends_.size(), half = steps / 2;
    out.first_step_seconds = backward_ends_[0];
    out.step_seconds =
        (backward_ends_[steps - 1] - backward_ends_[half - 1]) / static_cast<double>(steps - half);
    for (const SimulatedUnit& unit : state_.units) {
      out.compute_seconds += walk().repeats() * (unit.seconds.forward + unit.backward);
      out.compute_seconds += 2 * unit.seconds.pack;
      if (!unit.host_state) out.compute_seconds += unit.seconds.device_update;
      out.leaving_bytes.push_back(unit.others_leaving);
    }
    out.compute_seconds += loop_seconds_;
    out.gap_seconds = mean_of_second_half(gaps_);
    out.spans = std::move(spans_);
    return out;
  }

  const bool keep_;
  const double loop_seconds_;
  SimulatedState state_;
  SimulatedUploads uploads_;
  SimulatedGradients gradients_;
  SimulatedCollectives collectives_;
  std::vector<double> backward_ends_, gaps_;
  double step_ended_ = 0;
  std::vector<SimulatedSpan> spans_;
};

}  // namespace

Simulation simulate(const Profile& profile, const Plan& plan, const SimulationPolicy& policy,
                    bool keep_spans) {
  validate(profile);
  validate(profile, plan);
  require(policy.steps >= 3 && policy.steps <= 1000, "simulate: steps is ", policy.steps,
          ", expected 3 .. 1000");
  require(policy.gradient_buffers >= 1, "simulate: gradient_buffers is ", policy.gradient_buffers,
          ", expected at least 1");
  return Simulator(profile, plan, policy, keep_spans).run();
}

SimulationPolicy policy_of(const std::string& strategy) {
  SimulationPolicy policy;
  if (strategy == "zero_offload") {
    policy.priority_order = false;
    policy.iteration_barrier = true;
  } else if (strategy == "patrickstar") {
    policy.priority_order = false;
    policy.iteration_barrier = policy.synchronous_moves = true;
  } else if (strategy == "stronghold") {
    policy.priority_order = policy.gated = false;
    policy.iteration_barrier = true;
  }
  return policy;
}

}  // namespace autohete
