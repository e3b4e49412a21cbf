#include "csrc/plan/cost_model.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "csrc/plan/segments.h"
#include "csrc/plan/validate.h"

namespace autohete {
namespace {

constexpr std::size_t kLeavingGradients = 3;  // one being computed, two leaving

std::size_t sum_of_largest(std::vector<std::size_t> bytes, std::size_t how_many) {
  std::sort(bytes.begin(), bytes.end(), std::greater<>());
  std::size_t sum = 0;
  for (std::size_t i = 0; i < std::min(how_many, bytes.size()); ++i) sum += bytes[i];
  return sum;
}

std::size_t saved_bytes(const UnitProfile& unit, const UnitPlan& placed) {
  return placed.activations == ActivationRule::kRecompute ? unit.checkpoint_bytes
                                                          : unit.activation_bytes;
}

std::size_t device_gradient_bytes(const UnitProfile& unit, const UnitPlan& placed) {
  return placed.optimizer_state == Tier::kDevice ? unit.grad_bytes : 0;
}

// What does not come and go within a step.
std::size_t always_on_device(const Profile& profile, const Plan& plan) {
  std::size_t sum = profile.fixed_device_bytes, largest_offloaded = 0;
  std::vector<std::size_t> leaving;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const UnitProfile& unit = profile.units[i];
    const UnitPlan& placed = plan.units[i];
    if (placed.parameters == Tier::kDevice) {
      sum += unit.param_bytes;
    } else {
      largest_offloaded = std::max(largest_offloaded, unit.param_bytes);
    }
    if (placed.optimizer_state == Tier::kDevice) {
      sum += unit.state_bytes;
    } else {
      leaving.push_back(unit.grad_bytes);
    }
    if (profile.gradients_persist) sum += device_gradient_bytes(unit, placed);
  }
  return sum + static_cast<std::size_t>(plan.window) * largest_offloaded +
         sum_of_largest(std::move(leaving), kLeavingGradients);
}

}  // namespace

std::vector<DeviceVisit> device_visits(const Profile& profile, const Plan& plan) {
  validate(profile, plan);
  const int count = static_cast<int>(plan.units.size());
  std::size_t held = always_on_device(profile, plan);  // and what forward saved, and gradients
  std::vector<DeviceVisit> visits;
  for (int i = 0; i < count; ++i) {
    const UnitProfile& unit = profile.units[i];
    held += saved_bytes(unit, plan.units[i]);
    visits.push_back({i, false, held + unit.temporary_bytes});
  }
  for (int i = count; i-- > 0;) {
    const UnitProfile& unit = profile.units[i];
    const UnitPlan& placed = plan.units[i];
    if (!profile.gradients_persist) held += device_gradient_bytes(unit, placed);
    const bool recompute = placed.activations == ActivationRule::kRecompute;
    const std::size_t again = recompute ? unit.activation_bytes : 0;
    visits.push_back({i, true, held + again + unit.temporary_bytes});
    held -= saved_bytes(unit, placed);
  }
  return visits;
}

std::size_t device_peak_bytes(const Profile& profile, const Plan& plan) {
  std::size_t peak = always_on_device(profile, plan);
  for (const DeviceVisit& visit : device_visits(profile, plan)) peak = std::max(peak, visit.bytes);
  return peak;
}

std::size_t host_bytes(const Profile& profile, const Plan& plan) {
  validate(profile, plan);
  std::size_t sum = profile.fixed_host_bytes;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const UnitProfile& unit = profile.units[i];
    if (plan.units[i].optimizer_state == Tier::kDevice) continue;
    const bool parameters = plan.units[i].parameters == Tier::kHost;
    sum += unit.state_bytes + unit.grad_bytes;
    if (profile.speculates) sum += unit.state_bytes + unit.grad_bytes;  // trainable parameters'
    sum += parameters ? unit.param_bytes : unit.master_bytes;
  }
  return sum;
}

LaneSeconds lane_seconds(const Profile& profile, const Plan& plan) {
  validate(profile, plan);
  const double repeats = profile.gradient_accumulation_steps;
  LaneSeconds lanes;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const UnitSeconds unit = unit_seconds(profile.units[i], profile);
    const UnitPlan& placed = plan.units[i];
    const bool recompute = placed.activations == ActivationRule::kRecompute;
    lanes.compute += repeats * (unit.forward * (recompute ? 2 : 1) + unit.backward);
    if (placed.optimizer_state == Tier::kDevice) {
      lanes.compute += unit.device_update;
      continue;
    }
    lanes.cpu += unit.cpu_update;
    lanes.d2h += repeats * unit.download;
    lanes.h2d += placed.parameters == Tier::kHost ? 2 * repeats * unit.upload : unit.upload_update;
  }
  return lanes;
}

std::string binding_lane(const LaneSeconds& lanes) {
  const double busiest = std::max({lanes.compute, lanes.h2d, lanes.d2h, lanes.cpu});
  if (lanes.compute == busiest) return "compute";
  if (lanes.cpu == busiest) return "cpu";
  return lanes.h2d == busiest ? "h2d" : "d2h";
}

}  // namespace autohete
