#include "csrc/kernels/adamw.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/kernels/adamw_loop.h"
#include "csrc/kernels/float_mode.h"
#include "csrc/kernels/half.h"
#include "csrc/kernels/hash_run.h"
#include "csrc/kernels/kernels.h"
#include "csrc/kernels/square_sum.h"
#include "csrc/kernels/stream_copy.h"
#include "csrc/runtime/workers.h"

namespace autohete {
namespace {

// From this many bytes written in one call on, destinations that were not read bypass the caches.
constexpr std::size_t kStreamBytes = std::size_t{32} << 20;

// A piece of one span, and what was seen in it.
struct AdamTile {
  const AdamSpan* span;
  const AdamCoefficients* coefficients;
  std::uint64_t position;  // of the span in what is hashed
  std::size_t begin, end;
  StreamCopy stream;  // null: all stores go through the caches
  HashFunction hash;  // null: no by-products
  double grad_sq_sum = 0;
  ContentHash grad_hash{};
  std::size_t edited = 0;
};

// The master where the half copy is still its rounding, else the half copy. Returns how many
// differ.
template <typename Half>
AH_INLINE std::size_t take_edits(const std::uint16_t* half, const float* master, float* out,
                                 std::size_t n) {
  std::uint32_t edited = 0;
  AH_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const bool same = Half::narrow(master[i]) == half[i];
    out[i] = same ? master[i] : Half::widen(half[i]);
    edited += same ? 0u : 1u;
  }
  return edited;
}

AH_INLINE const float* current_param(const AdamSpan& span, std::size_t at, std::size_t n,
                                     float* scratch, std::size_t& edited) {
  const float* master = span.param_in + at;
  if (span.half_in == nullptr) return master;
  const auto* half = static_cast<const std::uint16_t*>(span.half_in) + at;
  edited += span.half_dtype == DType::kBFloat16 ? take_edits<Bf16>(half, master, scratch, n)
                                                : take_edits<Fp16>(half, master, scratch, n);
  return scratch;
}

// A block at a time is too short a run for the hardware to keep memory busy across five streams and
// more; asking for the block after the next does (measured: 10 to 15 %).
AH_INLINE void prefetch(const void* stream, std::size_t item, std::size_t at) {
  const auto* begin = static_cast<const char*>(stream) + at * item;
  for (std::size_t byte = 0; byte < kBlock * item; byte += 64) __builtin_prefetch(begin + byte, 1);
}

AH_INLINE void prefetch_ahead(const AdamSpan& span, std::size_t at, std::size_t end) {
  at += 2 * kBlock;
  if (at + kBlock > end) return;
  prefetch(span.param_in, sizeof(float), at);
  prefetch(span.exp_avg_in, sizeof(float), at);
  prefetch(span.exp_avg_sq_in, sizeof(float), at);
  if (span.hyper.amsgrad) prefetch(span.max_exp_avg_sq_in, sizeof(float), at);
  if (span.half_in != nullptr) prefetch(span.half_in, item_bytes(span.half_dtype), at);
  prefetch(span.grad, item_bytes(span.grad_dtype), at);
}

// New values on their way to destinations that are not to pass through the caches.
struct StreamBlock {
  alignas(64) float param[kBlock], exp_avg[kBlock], exp_avg_sq[kBlock], max_exp_avg_sq[kBlock];

  AH_INLINE AdamBlock instead_of(AdamBlock block) {
    block.param_out = param;
    block.exp_avg_out = exp_avg;
    block.exp_avg_sq_out = exp_avg_sq;
    block.max_exp_avg_sq_out = max_exp_avg_sq;
    return block;
  }

  AH_INLINE void store(const AdamBlock& block, std::size_t n, StreamCopy copy) const {
    copy(block.param_out, param, n * sizeof(float));
    copy(block.exp_avg_out, exp_avg, n * sizeof(float));
    copy(block.exp_avg_sq_out, exp_avg_sq, n * sizeof(float));
    if (block.max_exp_avg_sq_out != nullptr) {
      copy(block.max_exp_avg_sq_out, max_exp_avg_sq, n * sizeof(float));
    }
  }
};

// The half copy of `param`. One that was read for edits is in the cache already.
AH_INLINE void store_half(const AdamTile& tile, const float* param, std::size_t at, std::size_t n) {
  const AdamSpan& span = *tile.span;
  auto* out = static_cast<std::uint16_t*>(span.half_out) + at;
  if (tile.stream == nullptr || span.half_in == span.half_out) {
    return narrow(param, out, span.half_dtype, n);
  }
  alignas(64) std::uint16_t scratch[kBlock];
  narrow(param, scratch, span.half_dtype, n);
  tile.stream(out, scratch, n * sizeof(std::uint16_t));
}

AH_INLINE void adamw_tile(AdamTile& tile) {
  alignas(64) float grad_scratch[kBlock];
  alignas(64) float param_scratch[kBlock];
  StreamBlock streamed;
  SquareSum squares;
  const AdamSpan& span = *tile.span;
  HashRun hash = {item_bytes(span.grad_dtype)};
  const bool amsgrad = span.hyper.amsgrad;
  const bool stream = tile.stream != nullptr && span.param_out != span.param_in;
  for (std::size_t at = tile.begin; at < tile.end; at += kBlock) {
    const std::size_t n = std::min(kBlock, tile.end - at);
    prefetch_ahead(span, at, tile.end);
    const float* grad = widened(span.grad, span.grad_dtype, at, n, grad_scratch);
    if (tile.hash != nullptr) {
      squares.add(grad, n);
      hash.items = static_cast<const char*>(span.grad) + at * hash.item_bytes;
      hash.position = tile.position + at;
      hash.numel = n;
      tile.hash(hash);
    }
    const AdamBlock block = {grad,
                             current_param(span, at, n, param_scratch, tile.edited),
                             span.exp_avg_in + at,
                             span.exp_avg_sq_in + at,
                             amsgrad ? span.max_exp_avg_sq_in + at : nullptr,
                             span.param_out + at,
                             span.exp_avg_out + at,
                             span.exp_avg_sq_out + at,
                             amsgrad ? span.max_exp_avg_sq_out + at : nullptr};
    const AdamBlock target = stream ? streamed.instead_of(block) : block;
    adamw_block(*tile.coefficients, target, amsgrad, n);
    if (span.half_out != nullptr) store_half(tile, target.param_out, at, n);
    if (stream) streamed.store(block, n, tile.stream);
  }
  if (tile.stream != nullptr) stream_fence();
  tile.grad_sq_sum = squares.total();
  tile.grad_hash = hash.sum;
}

AH_LEVELS(kAdamwTile, adamw_tile, AdamTile)

void check_hyper(const AdamHyper& hyper, double step) {
  const auto finite = [](const char* name, double value) {
    require(std::isfinite(value), "adamw: ", name, " is ", value, ", expected a finite number");
  };
  const auto beta = [](const char* name, double value) {
    require(value >= 0 && value < 1, "adamw: ", name, " is ", value, ", expected 0 <= ", name,
            " < 1");
  };
  finite("lr", hyper.lr);
  beta("beta1", hyper.beta1);
  beta("beta2", hyper.beta2);
  finite("weight_decay", hyper.weight_decay);
  finite("grad_scale", hyper.grad_scale);
  require(hyper.eps >= 0, "adamw: eps is ", hyper.eps, ", expected eps >= 0");
  require(step >= 1 && std::isfinite(step), "adamw: step is ", step,
          ", expected the number of this update, 1 for the first");
}

void check_span(const AdamSpan& span) {
  check_hyper(span.hyper, span.step);
  if (span.numel == 0) return;
  const auto given = [](const char* name, const void* pointer) {
    require(pointer != nullptr, "adamw: ", name, " is null, expected an address");
  };
  given("grad", span.grad);
  given("param_in", span.param_in);
  given("exp_avg_in", span.exp_avg_in);
  given("exp_avg_sq_in", span.exp_avg_sq_in);
  given("param_out", span.param_out);
  given("exp_avg_out", span.exp_avg_out);
  given("exp_avg_sq_out", span.exp_avg_sq_out);
  if (span.hyper.amsgrad) given("max_exp_avg_sq_in", span.max_exp_avg_sq_in);
  if (span.hyper.amsgrad) given("max_exp_avg_sq_out", span.max_exp_avg_sq_out);
  require(
      (span.half_in == nullptr && span.half_out == nullptr) || span.half_dtype != DType::kFloat32,
      "adamw: half_dtype is float32, expected bfloat16 or float16");
}

std::vector<AdamTile> cut(const AdamSpan* spans, const std::vector<AdamCoefficients>& coefficients,
                          CpuLevel level, bool by_products) {
  std::size_t numel = 0;
  for (std::size_t s = 0; s < coefficients.size(); ++s) numel += spans[s].numel;
  const bool large = numel * 3 * sizeof(float) >= kStreamBytes;
  const StreamCopy stream = large ? stream_copy_function(level) : nullptr;
  const HashFunction hash = by_products ? hash_function(level) : nullptr;
  std::vector<AdamTile> tiles;
  std::uint64_t position = 0;
  for (std::size_t s = 0; s < coefficients.size(); ++s) {
    for (std::size_t begin = 0; begin < spans[s].numel; begin += kTile) {
      const std::size_t end = std::min(begin + kTile, spans[s].numel);
      tiles.push_back({&spans[s], &coefficients[s], position, begin, end, stream, hash});
    }
    position += hashed_items(spans[s].numel);
  }
  return tiles;
}

}  // namespace

UpdateStats adamw(const AdamSpan* spans, std::size_t num_spans, Workers& workers, CpuLevel level,
                  bool by_products) {
  require_supported(level, "adamw");
  std::vector<AdamCoefficients> coefficients;
  coefficients.reserve(num_spans);
  for (std::size_t s = 0; s < num_spans; ++s) {
    check_span(spans[s]);
    coefficients.emplace_back(spans[s].hyper, spans[s].step);
  }
  std::vector<AdamTile> tiles = cut(spans, coefficients, level, by_products);
  const auto run = kAdamwTile.at(level);
  workers.for_each_tile(tiles.size(), [&](std::size_t i) {
    const ExactFloatMode mode;
    run(tiles[i]);
  });
  UpdateStats stats;
  for (const AdamTile& tile : tiles) {  // in the order of the tiles, whoever ran them
    stats.grad_sq_norm += tile.grad_sq_sum;
    stats.grad_hash += tile.grad_hash;
    stats.edited += tile.edited;
  }
  stats.non_finite = !std::isfinite(stats.grad_sq_norm);
  return stats;
}

}  // namespace autohete
