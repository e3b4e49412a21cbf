// Everything the rest of the program may ask of the kernels. One plain loop each, compiled per
// instruction set and picked at run time (base/cpu_features.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "csrc/base/cpu_features.h"
#include "csrc/kernels/adamw.h"
#include "csrc/kernels/content_hash.h"
#include "csrc/kernels/lion.h"
#include "csrc/kernels/sgd.h"

namespace autohete {

class Workers;

// By-products of one pass over the gradients as read (before grad_scale).
struct UpdateStats {
  double grad_sq_norm = 0;  // sum of squares, accumulated in double
  bool non_finite = false;  // any gradient is inf or NaN
  ContentHash grad_hash{};  // of the gradients of all spans in their order, see content_hash.h
  std::size_t edited = 0;   // values taken from half_in because they were not param_in rounded
};

// Applies every span. A span is cut into tiles over the workers; new values do not depend on the
// cut, on how a tensor is divided into spans, on the thread or on the instruction set, to the bit.
// grad_sq_norm does not depend on threads or instruction set; dividing a tensor into other spans
// may move its last bits. Without `by_products` only `edited` is filled in; in the caches that
// saves up to a third, from memory a few percent. Throws std::invalid_argument before anything is
// written when a span lacks a pointer or a hyper-parameter is out of its range or NaN. `beside`, if
// any, is called once on one of the threads while the others update; it must not throw.
UpdateStats adamw(const AdamSpan* spans, std::size_t num_spans, Workers& workers,
                  CpuLevel level = cpu_level(), bool by_products = true,
                  const std::function<void()>& beside = nullptr);
// The same with pauses: `between` is called every few million items, with the number of items
// written since the last time, while no worker works for this call, so that others may have them.
// `positions`: where each span begins in what is hashed, in items, so that the grad_hashes of calls
// for some of the spans each add up to that of all; null: end to end as adamw() has them
// (hashed_items() of hash_run.h is what a span takes).
UpdateStats adamw_in_pieces(const AdamSpan* spans, std::size_t num_spans, Workers& workers,
                            bool by_products, const std::function<void(std::size_t)>& between,
                            const std::uint64_t* positions = nullptr);

// The same for the other rules.
UpdateStats sgd(const SgdSpan* spans, std::size_t num_spans, Workers& workers,
                CpuLevel level = cpu_level(), bool by_products = true,
                const std::function<void()>& beside = nullptr);
UpdateStats lion(const LionSpan* spans, std::size_t num_spans, Workers& workers,
                 CpuLevel level = cpu_level(), bool by_products = true,
                 const std::function<void()>& beside = nullptr);

// Gradients to look at: numel items of dtype.
struct GradSpan {
  const void* values = nullptr;
  DType dtype = DType::kFloat32;
  std::size_t numel = 0;
};

// What adamw() would report of these gradients, without an update, in one pass: the same
// grad_sq_norm and grad_hash, to the bit, for the same spans in the same order.
UpdateStats gradient_stats(const GradSpan* spans, std::size_t num_spans, Workers& workers,
                           CpuLevel level = cpu_level());

// The hash alone, at the speed of reading memory. Dividing a tensor into consecutive spans at
// multiples of 128 items leaves it as it is; other divisions and another order change it.
ContentHash content_hash(const GradSpan* spans, std::size_t num_spans, Workers& workers,
                         CpuLevel level = cpu_level());

// Sum of squares of `numel` items in double, and whether any is non-finite. The same bits as
// adamw()'s grad_sq_norm over one span.
UpdateStats squared_norm(const void* values, DType dtype, std::size_t numel, Workers& workers,
                         CpuLevel level = cpu_level());

// memcpy over the workers; picks threads and non-temporal stores by size.
void copy_bytes(void* dst, const void* src, std::size_t bytes, Workers& workers);

// Rounds to nearest even (NaN stays NaN) or widens.
void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t numel,
          Workers& workers, CpuLevel level = cpu_level());

}  // namespace autohete
