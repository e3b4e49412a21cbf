#include "csrc/plan/cost_model.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/plan/segments.h"
#include "csrc/plan/validate.h"

namespace autohete {
namespace {

constexpr std::size_t kLeavingGradients = 2;  // beside the one being computed

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

// What comes back when it is recomputed, beside what was kept for that.
std::size_t recomputed_bytes(const UnitProfile& unit, const UnitPlan& placed) {
  if (placed.activations == ActivationRule::kKeep) return 0;
  return unit.activation_bytes - std::min(unit.activation_bytes, unit.checkpoint_bytes);
}

std::size_t device_gradient_bytes(const UnitProfile& unit, const UnitPlan& placed) {
  return placed.optimizer_state == Tier::kDevice ? unit.grad_bytes : 0;
}

std::size_t host_gradient_bytes(const UnitProfile& unit, const UnitPlan& placed) {
  return placed.optimizer_state == Tier::kHost ? unit.grad_bytes : 0;
}

// The largest of what it was given.
class Largest {
 public:
  void add(std::size_t bytes) {
    bytes_.insert(std::upper_bound(bytes_.begin(), bytes_.end(), bytes, std::greater<>()), bytes);
    if (bytes_.size() > kLeavingGradients) bytes_.pop_back();
  }
  const std::vector<std::size_t>& bytes() const { return bytes_; }

 private:
  std::vector<std::size_t> bytes_;
};

// By unit: gradients of others that may still be leaving while it runs. They are of later units: a
// forward has waited for the updates of the units before it, a backward has not touched their
// gradients yet. With several micro-batches they are of any: no forward but the first waits.
std::vector<std::size_t> leaving_at_most(const Profile& profile, const Plan& plan) {
  const bool of_any = profile.gradient_accumulation_steps > 1;
  const std::size_t count = plan.units.size();
  std::vector<std::vector<std::size_t>> later(count);
  Largest largest;
  for (std::size_t i = count; i-- > 0;) {
    later[i] = largest.bytes();
    largest.add(host_gradient_bytes(profile.units[i], plan.units[i]));
  }
  std::vector<std::size_t> sums(count);
  Largest before;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<std::size_t> others = later[i];
    if (of_any) others.insert(others.end(), before.bytes().begin(), before.bytes().end());
    sums[i] = sum_of_largest(std::move(others), kLeavingGradients);
    before.add(host_gradient_bytes(profile.units[i], plan.units[i]));
  }
  return sums;
}

// What does not come and go within a step.
std::size_t always_on_device(const Profile& profile, const Plan& plan) {
  std::size_t sum = profile.fixed_device_bytes;
  std::vector<std::size_t> offloaded;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const UnitProfile& unit = profile.units[i];
    const UnitPlan& placed = plan.units[i];
    if (placed.parameters == Tier::kDevice) {
      sum += unit.param_bytes;
    } else {
      offloaded.push_back(unit.param_bytes);
    }
    if (placed.optimizer_state == Tier::kDevice) sum += unit.state_bytes;
    if (profile.gradients_persist) sum += device_gradient_bytes(unit, placed);
  }
  return sum + sum_of_largest(std::move(offloaded), static_cast<std::size_t>(plan.window));
}

// Of the uploads before every visit, those that the window spares: what it holds where the walk
// turns is there already. From forward to backward these are the last units, from backward to
// forward the first; at a step's end what was updated goes up anew, and others may have stayed.
double spared_upload_seconds(const Profile& profile, const Plan& plan) {
  std::vector<double> uploads, not_updated;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    if (plan.units[i].parameters == Tier::kDevice) continue;
    uploads.push_back(unit_seconds(profile.units[i], profile).upload);
    if (profile.units[i].grad_bytes == 0) not_updated.push_back(uploads.back());
  }
  std::sort(not_updated.begin(), not_updated.end(), std::greater<>());
  const auto window = static_cast<std::ptrdiff_t>(plan.window);
  const auto held = std::min(std::ssize(uploads), window);
  const auto stayed = std::min(std::ssize(not_updated), window);
  const double repeats = profile.gradient_accumulation_steps;
  return repeats * std::accumulate(uploads.end() - held, uploads.end(), 0.0) +
         (repeats - 1) * std::accumulate(uploads.begin(), uploads.begin() + held, 0.0) +
         std::accumulate(not_updated.begin(), not_updated.begin() + stayed, 0.0);
}

}  // namespace

std::vector<DeviceVisit> device_visits(const Profile& profile, const Plan& plan) {
  validate(profile, plan);
  return device_visits(profile, plan, leaving_at_most(profile, plan));
}

std::vector<DeviceVisit> device_visits(const Profile& profile, const Plan& plan,
                                       const std::vector<std::size_t>& leaving) {
  validate(profile, plan);
  const int count = static_cast<int>(plan.units.size());
  AH_ASSERT(leaving.size() == plan.units.size());
  std::size_t held = always_on_device(profile, plan);  // and what forward saved, and gradients
  std::vector<DeviceVisit> visits;
  for (int i = 0; i < count; ++i) {
    const UnitProfile& unit = profile.units[i];
    held += saved_bytes(unit, plan.units[i]);
    visits.push_back({i, false, held + leaving[i] + unit.temporary_bytes});
  }
  for (int i = count; i-- > 0;) {
    const UnitProfile& unit = profile.units[i];
    const UnitPlan& placed = plan.units[i];
    if (!profile.gradients_persist) held += device_gradient_bytes(unit, placed);
    const std::size_t again = recomputed_bytes(unit, placed);
    const std::size_t gradients = leaving[i] + host_gradient_bytes(unit, placed);
    visits.push_back({i, true, held + again + gradients + unit.temporary_bytes});
    held -= saved_bytes(unit, placed);
  }
  return visits;
}

std::size_t largest_visit(const std::vector<DeviceVisit>& visits) {
  std::size_t peak = 0;
  for (const DeviceVisit& visit : visits) peak = std::max(peak, visit.bytes);
  return peak;
}

std::size_t device_peak_bytes(const Profile& profile, const Plan& plan) {
  return largest_visit(device_visits(profile, plan));
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
  lanes.compute = repeats * profile.outside_seconds + profile.loop_seconds;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const UnitSeconds unit = unit_seconds(profile.units[i], profile);
    const UnitPlan& placed = plan.units[i];
    const bool recompute = placed.activations == ActivationRule::kRecompute;
    lanes.compute += repeats * (unit.forward + unit.backward + (recompute ? unit.recompute : 0));
    lanes.compute += 2 * unit.pack;
    lanes.exchange += unit.exchange;
    if (placed.optimizer_state == Tier::kDevice) {
      lanes.compute += unit.device_update;
      continue;
    }
    lanes.cpu += unit.cpu_update;
    lanes.gather += unit.gather;
    lanes.d2h += repeats * unit.download;
    lanes.h2d += placed.parameters == Tier::kHost ? 2 * repeats * unit.upload : unit.upload_update;
  }
  lanes.h2d -= spared_upload_seconds(profile, plan);
  return lanes;
}

std::string binding_lane(const LaneSeconds& lanes) {
  const double busiest =
      std::max({lanes.compute, lanes.h2d, lanes.d2h, lanes.cpu, lanes.exchange, lanes.gather});
  if (lanes.compute == busiest) return "compute";
  if (lanes.cpu == busiest) return "cpu";
  if (lanes.exchange == busiest) return "exchange";
  if (lanes.gather == busiest) return "gather";
  return lanes.h2d == busiest ? "h2d" : "d2h";
}

}  // namespace autohete
