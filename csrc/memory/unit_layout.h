// Where a unit's tensors lie in its blocks: one block each for parameters, gradients and optimizer
// state. Offsets and sizes are multiples of kBlockAlignment.
//
// The large streams of one parameter's update (the parameter, its gradient, each array of its
// state, and the same in the spare blocks of an update ahead of step()) begin apart, see
// csrc/base/stream_place.h. Parameters lie one behind the other; the gaps are in the blocks of
// gradients and state, about kStreamStep for each large tensor.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "csrc/base/stream_place.h"
#include "csrc/device/store.h"

namespace autohete {

// exp_avg, exp_avg_sq, max_exp_avg_sq, master: the arrays of one parameter's state, in this order.
enum StateArray { kExpAvg = 0, kExpAvgSq = 1, kMaxExpAvgSq = 2, kMaster = 3, kStateArrays = 4 };

// How far behind a large page's beginning the spare blocks of a unit with large streams begin: more
// than a step for each stream of an update, so that new values do not go to where old ones are
// read.
inline constexpr std::size_t kSpareLead = 8 * kStreamStep;

// What one parameter needs.
struct StreamSizes {
  std::size_t bytes = 0;        // of the parameter, and of its gradient
  std::size_t part_begin = 0;   // bytes before this rank's part of both
  std::size_t array_bytes = 0;  // of one array of this rank's state, not rounded
  bool has_gradient = false;
  std::array<bool, kStateArrays> has_array{};
};

struct StreamOffsets {
  std::size_t param = 0, gradient = 0;
  std::array<std::size_t, kStateArrays> state{};
};

struct UnitLayout {
  std::vector<StreamOffsets> offsets;  // one for each parameter
  std::size_t param_bytes = 0, gradient_bytes = 0, state_bytes = 0;
  std::size_t gradient_gaps = 0;  // bytes of gradient_bytes that lie between two gradients
  std::size_t spare_lead = 0;     // kSpareLead, or 0 where no stream is large
};

UnitLayout lay_out(const std::vector<StreamSizes>& parameters);

// `whole` from `lead` bytes behind its beginning on; keeps it alive.
BlockPtr begin_behind(BlockPtr whole, std::size_t lead);

}  // namespace autohete
