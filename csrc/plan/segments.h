// Units in forward order, grouped into runs of identical layers ("segments"), with each unit's work
// in seconds. A pattern of kinds that repeats at least three times in a row (dense, MoE, dense,
// MoE,
// ...) is one run too: of super-layers, each one period of the pattern, placed as a whole. Below,
// "unit" is a layer or a super-layer. Three integers describe a segment's placement, so a plan is
// small to search:
//   c leading units recompute, o trailing units keep optimizer state on the host, and p of those o
//   keep parameters there too (p <= o): the last p, or p spread evenly with the last among them.
// Trailing: their gradients come first in backward and their parameters are needed last in the next
// forward, so both the copy and the update hide (arXiv 2503.01890).
// Spread: where a unit's upload takes longer than its compute, uploads of spread units also hide
// behind the units between them.
#pragma once

#include <cstddef>
#include <vector>

#include "csrc/plan/plan.h"

namespace autohete {

// One unit's work. Bytes and parameter counts are those of UnitProfile.
struct UnitSeconds {
  double forward = 0;
  double backward = 0;
  double upload = 0;         // all parameters, host to device
  double upload_update = 0;  // trainable parameters, host to device, after a CPU update
  double download = 0;       // gradients, device to host
  double recompute = 0;      // forward again, in backward
  double cpu_update = 0;     // of this rank's rows
  double device_update = 0;  // of this rank's rows, and the gather of all
  // With several ranks, else 0:
  double exchange = 0;  // gradients averaged
  double gather = 0;    // updated rows of all brought together on the host
  double pack = 0;      // gradients laid out for the exchange; taken up again in as long
};

// latency x copies + bytes / bandwidth, a copy for each chunk and `tensors` at least. 0 for 0
// bytes.
double copy_seconds(std::size_t bytes, double bytes_per_second, const Profile& profile,
                    int tensors = 1);

// Parameters that are updated. Gradients have the parameters' dtype, so the share of bytes is the
// share of parameters.
double trainable_parameters(const UnitProfile& unit);

UnitSeconds unit_seconds(const UnitProfile& unit, const Profile& profile);

struct Segment {
  int first = 0;         // index of its first layer
  int count = 0;         // units
  int period = 1;        // layers in a unit
  UnitProfile unit;      // sums over the period; temporary_bytes the largest. Where recomputing a
                         // layer saves nothing it is kept, in checkpoint_bytes too
  UnitSeconds seconds;   // sums over the period
  UnitSeconds of_layer;  // mean over the period
  double recompute_seconds = 0;  // of the layers where recomputing saves something
  // Of the period's layers, the largest parameters, gradients, and what recomputing brings back:
  // activations without the checkpoint.
  std::size_t largest_param_bytes = 0;
  std::size_t largest_grad_bytes = 0;
  std::size_t largest_recomputed_bytes = 0;
  int max_recompute = 0;  // 0 or count
  int max_parameters = 0;
  int max_state = 0;
};

// Maximal runs of equal `kind` and of periodic patterns (up to 16 layers long, whose layers all
// have parameters and agree on can_offload_parameters), from the front. Throws when neighbours of
// one kind, or the same layer of two periods, differ in bytes.
std::vector<Segment> segments_of(const Profile& profile);

struct SegmentCounts {
  int recompute = 0;   // c
  int parameters = 0;  // p
  int state = 0;       // o
};

enum class Spacing { kTrailing, kSpread };

// Counts -> placement of every unit, and window and chunk as given.
Plan decode_plan(const Profile& profile, const std::vector<Segment>& segments,
                 const std::vector<SegmentCounts>& counts, int window, Spacing spacing);

}  // namespace autohete
