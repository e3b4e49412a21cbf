// Everything the rest of the program may ask of the kernels. One plain loop each, compiled per
// instruction set and picked at run time (base/cpu_features.h).
#pragma once

#include <cstddef>

#include "csrc/kernels/adamw.h"

namespace autohete {

class Workers;

// By-products of one pass over the gradients as read (before grad_scale).
struct UpdateStats {
  double grad_sq_norm = 0;   // sum of squares, accumulated in double
  bool non_finite = false;   // any gradient is inf or NaN
};

// Applies every span. A span is cut into tiles over the workers; results do not depend on the cut
// or on the instruction set.
UpdateStats adamw(const AdamSpan* spans, std::size_t num_spans, Workers& workers);

// Sum of squares of `numel` items in double, and whether any is non-finite.
UpdateStats squared_norm(const void* values, DType dtype, std::size_t numel, Workers& workers);

// memcpy over the workers; picks threads and non-temporal stores by size.
void copy_bytes(void* dst, const void* src, std::size_t bytes, Workers& workers);

// Rounds to nearest even (NaN stays NaN) or widens.
void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t numel,
          Workers& workers);

}  // namespace autohete
