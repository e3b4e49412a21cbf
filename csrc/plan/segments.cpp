#include "csrc/plan/segments.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "csrc/base/check.h"

namespace autohete {
namespace {

bool same_layer(const UnitProfile& a, const UnitProfile& b) {
  return a.num_parameters == b.num_parameters && a.param_bytes == b.param_bytes &&
         a.grad_bytes == b.grad_bytes && a.grad_tensors == b.grad_tensors &&
         a.largest_grad_tensor_bytes == b.largest_grad_tensor_bytes &&
         a.state_bytes == b.state_bytes && a.master_bytes == b.master_bytes &&
         a.activation_bytes == b.activation_bytes && a.checkpoint_bytes == b.checkpoint_bytes &&
         a.temporary_bytes == b.temporary_bytes &&
         a.can_offload_parameters == b.can_offload_parameters && a.can_recompute == b.can_recompute;
}

constexpr int kMaxPeriod = 16;
constexpr int kMinRepeats = 3;  // fewer are planned as runs of their own

bool pays_to_recompute(const UnitProfile& unit) {
  return unit.can_recompute && unit.checkpoint_bytes < unit.activation_bytes;
}

// How often the kinds of `period` layers from `first` on come in a row.
int num_repeats(const Profile& profile, int first, int period) {
  const int end = static_cast<int>(profile.units.size());
  int last = first + period;
  while (last < end && profile.units[last].kind == profile.units[last - period].kind) ++last;
  return last <= end ? (last - first) / period : 0;
}

bool can_be_one(const Profile& profile, int first, int period) {
  const UnitProfile& one = profile.units[first];
  for (int i = first; i < first + period; ++i) {
    const UnitProfile& unit = profile.units[i];
    if (unit.param_bytes == 0) return false;
    if (unit.can_offload_parameters != one.can_offload_parameters) return false;
  }
  return true;
}

// The period and the count of what covers most from `first` on; of equals the shortest period.
std::pair<int, int> longest_run(const Profile& profile, int first) {
  std::pair<int, int> best{1, num_repeats(profile, first, 1)};
  for (int period = 2; period <= kMaxPeriod; ++period) {
    const int count = num_repeats(profile, first, period);
    if (count < kMinRepeats || count * period <= best.first * best.second) continue;
    if (can_be_one(profile, first, period)) best = {period, count};
  }
  return best;
}

void add_seconds(UnitSeconds& sum, const UnitSeconds& more, double share) {
  sum.forward += share * more.forward;
  sum.backward += share * more.backward;
  sum.upload += share * more.upload;
  sum.upload_update += share * more.upload_update;
  sum.download += share * more.download;
  sum.recompute += share * more.recompute;
  sum.cpu_update += share * more.cpu_update;
  sum.device_update += share * more.device_update;
  sum.exchange += share * more.exchange;
  sum.gather += share * more.gather;
  sum.pack += share * more.pack;
}

void add_layer(Segment& segment, const UnitProfile& layer, const Profile& profile) {
  UnitProfile& sum = segment.unit;
  sum.num_parameters += layer.num_parameters;
  sum.param_bytes += layer.param_bytes;
  sum.grad_bytes += layer.grad_bytes;
  sum.largest_grad_tensor_bytes =
      std::max(sum.largest_grad_tensor_bytes, layer.largest_grad_tensor_bytes);
  sum.state_bytes += layer.state_bytes;
  sum.master_bytes += layer.master_bytes;
  sum.activation_bytes += layer.activation_bytes;
  sum.checkpoint_bytes +=
      pays_to_recompute(layer) ? layer.checkpoint_bytes : layer.activation_bytes;
  sum.temporary_bytes = std::max(sum.temporary_bytes, layer.temporary_bytes);
  segment.largest_param_bytes = std::max(segment.largest_param_bytes, layer.param_bytes);
  segment.largest_grad_bytes = std::max(segment.largest_grad_bytes, layer.grad_bytes);
  if (pays_to_recompute(layer)) {
    segment.largest_recomputed_bytes =
        std::max(segment.largest_recomputed_bytes, layer.activation_bytes - layer.checkpoint_bytes);
  }
  const UnitSeconds seconds = unit_seconds(layer, profile);
  add_seconds(segment.seconds, seconds, 1);
  add_seconds(segment.of_layer, seconds, 1.0 / segment.period);
  segment.recompute_seconds += pays_to_recompute(layer) ? seconds.recompute : 0;
}

Segment make_segment(const Profile& profile, int first) {
  Segment segment;
  segment.first = first;
  std::tie(segment.period, segment.count) = longest_run(profile, first);
  segment.unit.can_offload_parameters = profile.units[first].can_offload_parameters;
  for (int i = 0; i < segment.period; ++i) add_layer(segment, profile.units[first + i], profile);
  segment.max_recompute = segment.largest_recomputed_bytes > 0 ? segment.count : 0;
  segment.max_state = segment.unit.param_bytes > 0 ? segment.count : 0;
  segment.max_parameters = segment.unit.can_offload_parameters ? segment.max_state : 0;
  return segment;
}

void require_same(const UnitProfile& first, const UnitProfile& other) {
  require(same_layer(first, other), "profile: unit ", other.name, " of kind ", other.kind,
          " differs from ", first.name,
          ", expected equal bytes within a kind; give it a kind of its own");
}

// Does the i-th of `state` trailing units (0 the first) also offload its parameters?
bool parameters_leave(int i, int parameters, int state, Spacing spacing) {
  if (spacing == Spacing::kTrailing) return i >= state - parameters;
  return static_cast<long long>(i + 1) * parameters / state >
         static_cast<long long>(i) * parameters / state;
}

// Each rank updates its rows only, and all exchange.
void add_ranks(UnitSeconds& seconds, const UnitProfile& unit, const Profile& profile) {
  const RankProfile& ranks = profile.ranks;
  const double bytes = static_cast<double>(unit.grad_bytes);
  seconds.cpu_update /= ranks.num_ranks;
  seconds.device_update /= ranks.num_ranks;
  seconds.device_update +=
      ranks.device_gather_latency_seconds + bytes / ranks.device_gather_bytes_per_second;
  seconds.exchange = ranks.exchange_latency_seconds + bytes / ranks.exchange_bytes_per_second;
  seconds.gather = ranks.gather_latency_seconds + bytes / ranks.gather_bytes_per_second;
  seconds.pack = bytes / ranks.pack_bytes_per_second;
  if (!ranks.own_gradients) return;
  const auto num_ranks = static_cast<std::size_t>(ranks.num_ranks);
  const std::size_t own = (unit.grad_bytes + num_ranks - 1) / num_ranks;
  seconds.download = copy_seconds(own, profile.hardware.d2h_bytes_per_second, profile);
}

}  // namespace

double copy_seconds(std::size_t bytes, double bytes_per_second, const Profile& profile,
                    int tensors) {
  if (bytes == 0) return 0;
  const std::size_t chunks = (bytes + profile.chunk_bytes - 1) / profile.chunk_bytes;
  const std::size_t copies = std::max(chunks, static_cast<std::size_t>(tensors));
  return static_cast<double>(copies) * profile.hardware.link_latency_seconds +
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
  seconds.download =
      copy_seconds(unit.grad_bytes, hardware.d2h_bytes_per_second, profile, unit.grad_tensors);
  seconds.recompute = unit.recompute_seconds > 0 ? unit.recompute_seconds : unit.forward_seconds;
  seconds.cpu_update = trainable_parameters(unit) / hardware.cpu_params_per_second;
  seconds.device_update = trainable_parameters(unit) / hardware.device_params_per_second;
  if (profile.ranks.num_ranks > 1 && unit.grad_bytes > 0) add_ranks(seconds, unit, profile);
  return seconds;
}

std::vector<Segment> segments_of(const Profile& profile) {
  std::vector<Segment> segments;
  const int num_layers = static_cast<int>(profile.units.size());
  for (int first = 0; first < num_layers;) {
    segments.push_back(make_segment(profile, first));
    const int period = segments.back().period, end = first + period * segments.back().count;
    for (int i = first + period; i < end; ++i) {
      require_same(profile.units[i - period], profile.units[i]);
    }
    first = end;
  }
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
      const int trailing = i - (segments[g].count - state);
      if (trailing >= 0) {
        unit.gradients = unit.optimizer_state = Tier::kHost;
        if (parameters_leave(trailing, parameters, state, spacing)) {
          unit.parameters = Tier::kHost;
        }
      }
      for (int j = 0; j < segments[g].period; ++j) {
        const bool pays = pays_to_recompute(profile.units[segments[g].first + j]);
        unit.activations =
            i < recompute && pays ? ActivationRule::kRecompute : ActivationRule::kKeep;
        plan.units.push_back(unit);
      }
    }
  }
  return plan;
}

}  // namespace autohete
