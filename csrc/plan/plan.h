// Plain data: what is measured (Profile), what is allowed (Budgets), what is decided (Plan).
// No behaviour here. Bytes, seconds, bytes per second, parameters per second throughout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/device/store.h"  // Tier

namespace autohete {

enum class ActivationRule : std::uint8_t { kKeep, kRecompute };

// One unit as the planner sees it. Units of one `kind` are identical layers.
struct UnitProfile {
  std::string name;                           // "transformer.h.3"
  std::string kind;                           // equal strings: equal layers
  std::int64_t num_parameters = 0;            // trainable and frozen
  std::size_t param_bytes = 0;                // in the dtype the device computes with
  std::size_t grad_bytes = 0;                 // trainable ones
  int grad_tensors = 1;                       // they leave the device one by one
  std::size_t largest_grad_tensor_bytes = 0;  // of one of them
  std::size_t state_bytes = 0;                // moments, and fp32 masters in the half regime
  std::size_t master_bytes = 0;      // fp32 copy the host keeps when only the state is offloaded
  std::size_t activation_bytes = 0;  // kept for backward without checkpointing
  std::size_t checkpoint_bytes = 0;  // kept for backward with checkpointing (its inputs)
  std::size_t temporary_bytes = 0;   // largest extra inside its own forward or backward
  double forward_seconds = 0;
  double backward_seconds = 0;  // without the recomputed forward
  // Of the forward when it runs again, which ends with the last tensor that backward needs.
  // 0: not known, taken as forward_seconds.
  double recompute_seconds = 0;
  bool can_offload_parameters = true;  // false: it contains other units
  bool can_recompute = true;           // false: embedding, head, containers
};

struct HardwareProfile {
  double h2d_bytes_per_second = 0;
  double d2h_bytes_per_second = 0;
  double link_latency_seconds = 0;      // per chunk; of gradients per tensor at least
  double cpu_params_per_second = 0;     // CPU AdamW, all workers
  double device_params_per_second = 0;  // AdamW on the device
  // Contention, as the share of its full rate that the first keeps while the second is busy.
  double h2d_share_during_d2h = 1;
  double d2h_share_during_h2d = 1;
  double copy_share_during_cpu = 1;     // both directions, while the CPU updates
  double cpu_share_during_copy = 1;     // while either direction copies
  double cpu_share_during_compute = 1;  // below 1 where the device computes on the same cores
  double compute_share_during_cpu = 1;
  double compute_share_during_copy = 1;  // both below 1 where all share cores or memory
};

// The ranks that train one model together, all alike, as one of them sees it. Each averages every
// unit's gradients over all, updates its rows (1 / num_ranks of them) and gets the other rows from
// the others. With one rank nothing below counts.
struct RankProfile {
  int num_ranks = 1;
  bool own_gradients = false;  // each averages the gradients of its rows only; those leave
  // Updated rows are brought together as they are ready, not from step() on. This engine waits.
  bool early_gathers = false;
  // Collectives, in bytes of a whole unit's gradients or trainable parameters, whatever moves for
  // them: gradients averaged; parts brought together on the host and on the device. Each takes its
  // latency too.
  double exchange_bytes_per_second = 0;
  double gather_bytes_per_second = 0;
  double device_gather_bytes_per_second = 0;
  double exchange_latency_seconds = 0;
  double gather_latency_seconds = 0;
  double device_gather_latency_seconds = 0;
  // Laying gradients out for an exchange; taking them up again is as fast. Work of the device.
  double pack_bytes_per_second = 0;
  // The share of its full rate that the first keeps while the second goes on: below 1 where they
  // are on the same cores or the same link. "collective": an exchange or a gather on the host.
  double compute_share_during_collective = 1;
  double cpu_share_during_collective = 1;
  double collective_share_during_compute = 1;
  double collective_share_during_cpu = 1;
  double collective_share_during_other = 1;  // an exchange during a gather, and the reverse
};

struct Profile {
  std::vector<UnitProfile> units;  // in forward order
  HardwareProfile hardware;
  RankProfile ranks;
  std::size_t fixed_device_bytes = 0;  // inputs, logits, loss and what else no unit owns
  std::size_t fixed_host_bytes = 0;
  // Compute of each forward and backward pass that is no unit's: the loss, the loop itself. It
  // falls between the last forward and the first backward.
  double outside_seconds = 0;
  // Likewise of each step behind its last backward and the updates on the device: step(), the loop.
  double loop_seconds = 0;
  int gradient_accumulation_steps = 1;
  // Gradients of units updated on the device live on through the next forward (preallocated, or
  // zeroed late). False: they appear during backward and are gone before the next forward.
  bool gradients_persist = true;
  // Updates on the host run before the step is known to be good and can be taken back: the host
  // keeps a second copy of what they overwrite, state and trainable parameters.
  bool speculates = false;
  std::size_t chunk_bytes = std::size_t{4} << 20;
};

struct Budgets {
  std::size_t device_bytes = 0;
  std::size_t host_bytes = 0;
};

struct UnitPlan {
  Tier parameters = Tier::kDevice;
  Tier gradients = Tier::kDevice;        // host whenever the optimizer state is on the host
  Tier optimizer_state = Tier::kDevice;  // the update runs where the state is
  ActivationRule activations = ActivationRule::kKeep;
};

struct Plan {
  std::vector<UnitPlan> units;
  std::string strategy = "autohete";
  int window = 2;  // device slots for parameters that live on the host
  std::size_t chunk_bytes = std::size_t{4} << 20;
  // Predictions. Zero when nothing was predicted (a plan written by hand).
  double step_seconds = 0;
  std::size_t device_peak_bytes = 0;  // expected; what fits is decided by cost_model.h's bound
  std::size_t host_bytes = 0;
  std::string solver;        // "glpk" or "enumeration"
  std::string binding_lane;  // "compute", "h2d", "d2h", "cpu", "exchange", "gather"
};

}  // namespace autohete
