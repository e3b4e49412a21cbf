#include "csrc/plan/validate.h"

#include <algorithm>
#include <cmath>

#include "csrc/base/check.h"

namespace autohete {
namespace {

constexpr std::size_t kMaxBytes = std::size_t{1} << 53;  // doubles count exactly up to here
constexpr std::size_t kMaxUnits = 100000;
constexpr double kMaxSeconds = 1e9;
constexpr double kMinRate = 1e-6, kMaxRate = 1e18;  // all bytes in between take finite seconds
constexpr int kMaxRanks = 1000000;
constexpr int kMaxVisits = 500000;  // units times micro-batches: a simulation takes some seconds
constexpr double kMinShare = 1e-9;  // of several at once too no work takes for ever

void require_seconds(const std::string& where, const char* field, double value) {
  require(std::isfinite(value) && value >= 0 && value <= kMaxSeconds, where, ": ", field, " is ",
          value, ", expected finite seconds >= 0; profile the model again");
}

void require_rate(const char* where, const char* field, double value) {
  require(value >= kMinRate && value < kMaxRate, where, ": ", field, " is ", value,
          ", expected a finite rate > 0 (", kMinRate, " .. ", kMaxRate,
          "); measure the machine or state the rate");
}

void require_share(const char* where, const char* field, double value) {
  require(value >= kMinShare && value <= 1, where, ": ", field, " is ", value,
          ", expected above 0 and at most 1 (", kMinShare, " at least)");
}

void require_bytes(const std::string& where, const char* field, std::size_t value) {
  require(value <= kMaxBytes, where, ": ", field, " is ", value, ", expected at most 2^53");
}

void validate_unit(const UnitProfile& unit) {
  const std::string where = "profile unit '" + unit.name + "'";
  require(unit.num_parameters >= 0, where, ": num_parameters is ", unit.num_parameters,
          ", expected >= 0");
  require_bytes(where, "num_parameters", static_cast<std::size_t>(unit.num_parameters));
  require_bytes(where, "param_bytes", unit.param_bytes);
  require_bytes(where, "grad_bytes", unit.grad_bytes);
  require(unit.grad_bytes <= unit.param_bytes, where, ": grad_bytes is ", unit.grad_bytes,
          ", expected at most param_bytes (", unit.param_bytes, "): one dtype for both");
  require(unit.grad_tensors >= 0 && unit.grad_tensors <= 1000000, where, ": grad_tensors is ",
          unit.grad_tensors, ", expected 0 .. 1000000");
  require(unit.largest_grad_tensor_bytes <= unit.grad_bytes, where,
          ": largest_grad_tensor_bytes is ", unit.largest_grad_tensor_bytes,
          ", expected at most grad_bytes (", unit.grad_bytes, ")");
  require_bytes(where, "state_bytes", unit.state_bytes);
  require_bytes(where, "master_bytes", unit.master_bytes);
  require_bytes(where, "activation_bytes", unit.activation_bytes);
  require_bytes(where, "checkpoint_bytes", unit.checkpoint_bytes);
  require_bytes(where, "temporary_bytes", unit.temporary_bytes);
  require_seconds(where, "forward_seconds", unit.forward_seconds);
  require_seconds(where, "backward_seconds", unit.backward_seconds);
  require_seconds(where, "recompute_seconds", unit.recompute_seconds);
}

void validate(const RankProfile& ranks) {
  const char* where = "profile.ranks";
  require(ranks.num_ranks >= 1 && ranks.num_ranks <= kMaxRanks, where, ": num_ranks is ",
          ranks.num_ranks, ", expected 1 .. ", kMaxRanks);
  if (ranks.num_ranks == 1) return;
  require_rate(where, "exchange_bytes_per_second", ranks.exchange_bytes_per_second);
  require_rate(where, "gather_bytes_per_second", ranks.gather_bytes_per_second);
  require_rate(where, "device_gather_bytes_per_second", ranks.device_gather_bytes_per_second);
  require_rate(where, "pack_bytes_per_second", ranks.pack_bytes_per_second);
  require_seconds(where, "exchange_latency_seconds", ranks.exchange_latency_seconds);
  require_seconds(where, "gather_latency_seconds", ranks.gather_latency_seconds);
  require_seconds(where, "device_gather_latency_seconds", ranks.device_gather_latency_seconds);
  require_share(where, "compute_share_during_collective", ranks.compute_share_during_collective);
  require_share(where, "cpu_share_during_collective", ranks.cpu_share_during_collective);
  require_share(where, "collective_share_during_compute", ranks.collective_share_during_compute);
  require_share(where, "collective_share_during_cpu", ranks.collective_share_during_cpu);
  require_share(where, "collective_share_during_other", ranks.collective_share_during_other);
}

}  // namespace

void validate(const HardwareProfile& hardware) {
  const char* where = "profile.hardware";
  require_rate(where, "h2d_bytes_per_second", hardware.h2d_bytes_per_second);
  require_rate(where, "d2h_bytes_per_second", hardware.d2h_bytes_per_second);
  require_rate(where, "cpu_params_per_second", hardware.cpu_params_per_second);
  require_rate(where, "device_params_per_second", hardware.device_params_per_second);
  require_seconds(where, "link_latency_seconds", hardware.link_latency_seconds);
  require_share(where, "h2d_share_during_d2h", hardware.h2d_share_during_d2h);
  require_share(where, "d2h_share_during_h2d", hardware.d2h_share_during_h2d);
  require_share(where, "copy_share_during_cpu", hardware.copy_share_during_cpu);
  require_share(where, "cpu_share_during_copy", hardware.cpu_share_during_copy);
  require_share(where, "cpu_share_during_compute", hardware.cpu_share_during_compute);
  require_share(where, "compute_share_during_cpu", hardware.compute_share_during_cpu);
  require_share(where, "compute_share_during_copy", hardware.compute_share_during_copy);
}

void validate(const Profile& profile) {
  require(!profile.units.empty(), "profile: units is empty, expected at least one unit");
  require(profile.units.size() <= kMaxUnits, "profile: it has ", profile.units.size(),
          " units, expected at most ", kMaxUnits);
  for (const UnitProfile& unit : profile.units) validate_unit(unit);
  validate(profile.hardware);
  validate(profile.ranks);
  require_bytes("profile", "fixed_device_bytes", profile.fixed_device_bytes);
  require_bytes("profile", "fixed_host_bytes", profile.fixed_host_bytes);
  require_seconds("profile", "outside_seconds", profile.outside_seconds);
  require_seconds("profile", "loop_seconds", profile.loop_seconds);
  require(profile.chunk_bytes >= 1, "profile: chunk_bytes is 0, expected at least 1");
  const int m = profile.gradient_accumulation_steps;
  const int most = std::max(1, kMaxVisits / static_cast<int>(profile.units.size()));
  require(m >= 1 && m <= most, "profile: gradient_accumulation_steps is ", m, ", expected 1 .. ",
          most, " with ", profile.units.size(), " units");
}

void validate(const Budgets& budgets) {
  require_bytes("budgets", "device_bytes", budgets.device_bytes);
  require_bytes("budgets", "host_bytes", budgets.host_bytes);
}

void validate(const Profile& profile, const Plan& plan) {
  require(plan.units.size() == profile.units.size(), "plan: it has ", plan.units.size(),
          " units, expected ", profile.units.size(), " as in the profile; plan again");
  require(std::isfinite(plan.step_seconds) && plan.step_seconds >= 0, "plan: step_seconds is ",
          plan.step_seconds, ", expected finite seconds >= 0; plan again");
  require(plan.window >= 1 && plan.window <= 1024, "plan: window is ", plan.window,
          ", expected 1 .. 1024");
  require(plan.chunk_bytes >= 1, "plan: chunk_bytes is 0, expected at least 1");
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const UnitPlan& unit = plan.units[i];
    const std::string& name = profile.units[i].name;
    require(unit.gradients == unit.optimizer_state, "plan unit '", name,
            "': gradients and optimizer_state differ, expected the same tier");
    require(unit.parameters == Tier::kDevice || unit.optimizer_state == Tier::kHost, "plan unit '",
            name, "': parameters are on the host, expected optimizer_state there too");
    require(unit.parameters == Tier::kDevice || profile.units[i].can_offload_parameters,
            "plan unit '", name, "': its parameters cannot leave the device");
    require(unit.activations == ActivationRule::kKeep || profile.units[i].can_recompute,
            "plan unit '", name, "': it cannot be recomputed");
  }
}

}  // namespace autohete
