#include "csrc/plan/segments.h"

#include "csrc/base/check.h"

namespace autohete {
namespace {

bool same_layer(const UnitProfile& a, const UnitProfile& b) {
  return a.num_parameters == b.num_parameters && a.param_bytes == b.param_bytes &&
         a.grad_bytes == b.grad_bytes && a.state_bytes == b.state_bytes &&
         a.master_bytes == b.master_bytes && a.activation_bytes == b.activation_bytes &&
         a.checkpoint_bytes == b.checkpoint_bytes && a.temporary_bytes == b.temporary_bytes &&
         a.can_offload_parameters == b.can_offload_parameters && a.can_recompute == b.can_recompute;
}

Segment start_segment(const Profile& profile, int index) {
  Segment segment;
  segment.first = index;
  segment.unit = profile.units[index];
  segment.seconds = unit_seconds(segment.unit, profile);
  return segment;
}

void finish_segment(Segment& segment) {
  const UnitProfile& unit = segment.unit;
  // Recomputing pays only where its inputs are smaller than what it drops.
  const bool recompute = unit.can_recompute && unit.checkpoint_bytes < unit.activation_bytes;
  segment.max_recompute = recompute ? segment.count : 0;
  segment.max_state = unit.param_bytes > 0 ? segment.count : 0;
  segment.max_parameters = unit.can_offload_parameters ? segment.max_state : 0;
}

// Does the i-th of `state` trailing units (0 the first) also offload its parameters?
bool parameters_leave(int i, int parameters, int state, Spacing spacing) {
  if (spacing == Spacing::kTrailing) return i >= state - parameters;
  return static_cast<long long>(i + 1) * parameters / state >
         static_cast<long long>(i) * parameters / state;
}

}  // namespace

double copy_seconds(std::size_t bytes, double bytes_per_second, const Profile& profile) {
  if (bytes == 0) return 0;
  const std::size_t chunks = (bytes + profile.chunk_bytes - 1) / profile.chunk_bytes;
  return static_cast<double>(chunks) * profile.hardware.link_latency_seconds +
         static_cast<double>(bytes) / bytes_per_second;
}

double trainable_parameters(const UnitProfile& unit) {
  if (unit.param_bytes == 0) return 0;
  return static_cast<double>(unit.num_parameters) * static_cast<double>(unit.grad_bytes) /
         static_cast<double>(unit.param_bytes);
}

UnitSeconds unit_seconds(const UnitProfile& unit, const Profile& profile) {
  const HardwareProfile& hardware = profile.hardware;
  UnitSeconds seconds;
  seconds.forward = unit.forward_seconds;
  seconds.backward = unit.backward_seconds;
  seconds.upload = copy_seconds(unit.param_bytes, hardware.h2d_bytes_per_second, profile);
  seconds.upload_update = copy_seconds(unit.grad_bytes, hardware.h2d_bytes_per_second, profile);
  seconds.download = copy_seconds(unit.grad_bytes, hardware.d2h_bytes_per_second, profile);
  seconds.cpu_update = trainable_parameters(unit) / hardware.cpu_params_per_second;
  seconds.device_update = trainable_parameters(unit) / hardware.device_params_per_second;
  return seconds;
}

std::vector<Segment> segments_of(const Profile& profile) {
  std::vector<Segment> segments;
  for (int i = 0; i < static_cast<int>(profile.units.size()); ++i) {
    const UnitProfile& unit = profile.units[i];
    if (segments.empty() || segments.back().unit.kind != unit.kind) {
      segments.push_back(start_segment(profile, i));
    }
    require(same_layer(segments.back().unit, unit), "profile: unit ", unit.name, " of kind ",
            unit.kind, " differs from ", segments.back().unit.name,
            ", expected equal bytes within a kind; give it a kind of its own");
    ++segments.back().count;
  }
  for (Segment& segment : segments) finish_segment(segment);
  return segments;
}

Plan decode_plan(const Profile& profile, const std::vector<Segment>& segments,
                 const std::vector<SegmentCounts>& counts, int window, Spacing spacing) {
  Plan plan;
  plan.window = window;
  plan.chunk_bytes = profile.chunk_bytes;
  for (std::size_t g = 0; g < segments.size(); ++g) {
    const auto [recompute, parameters, state] = counts[g];
    for (int i = 0; i < segments[g].count; ++i) {
      UnitPlan unit;
      if (i < recompute) unit.activations = ActivationRule::kRecompute;
      const int trailing = i - (segments[g].count - state);
      if (trailing >= 0) {
        unit.gradients = unit.optimizer_state = Tier::kHost;
        if (parameters_leave(trailing, parameters, state, spacing)) {
          unit.parameters = Tier::kHost;
        }
      }
      plan.units.push_back(unit);
    }
  }
  return plan;
}

}  // namespace autohete
