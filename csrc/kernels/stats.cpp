// The by-products of an update for themselves: squared norm and content hash of gradients.
#include <algorithm>
#include <cmath>
#include <vector>

#include "csrc/kernels/by_products.h"
#include "csrc/kernels/float_mode.h"
#include "csrc/kernels/half.h"
#include "csrc/kernels/kernels.h"
#include "csrc/runtime/workers.h"

namespace autohete {
namespace {

// A piece of one tensor, and what was found in it.
struct StatsTile {
  GradSpan span;
  std::uint64_t position;  // of the span in what is hashed
  std::size_t begin, end;
  Wanted wanted;
  double sum = 0;
  ContentHash hash{};
};

// The hash asks ahead for itself; a norm alone is read so fast that the hardware's own look-ahead
// is too short (measured: 1.5 to 2.5 times the time without).
AH_INLINE void prefetch_ahead(const GradSpan& span, std::size_t at, std::size_t n) {
  const std::size_t item = item_bytes(span.dtype);
  const auto* ahead = static_cast<const char*>(span.values) + at * item + 2048;
  for (std::size_t byte = 0; byte < n * item; byte += 64) __builtin_prefetch(ahead + byte);
}

AH_INLINE void stats_tile(StatsTile& tile) {
  alignas(64) float scratch[kBlock];
  const GradSpan& span = tile.span;
  ByProducts found(tile.wanted, span.values, span.dtype, tile.position, tile.end);
  for (std::size_t at = tile.begin; at < tile.end; at += kBlock) {
    const std::size_t n = std::min(kBlock, tile.end - at);
    if (tile.wanted.hash == nullptr) prefetch_ahead(span, at, n);
    const float* values =
        tile.wanted.norm ? widened(span.values, span.dtype, at, n, scratch) : nullptr;
    found.look_at(values, at, n);
  }
  tile.sum = found.sq_sum();
  tile.hash = found.hash();
}

AH_LEVELS(kStatsTile, stats_tile, StatsTile)

UpdateStats stats_of(const GradSpan* spans, std::size_t num_spans, Workers& workers, CpuLevel level,
                     Wanted wanted) {
  std::vector<StatsTile> tiles;
  std::uint64_t position = 0;
  for (std::size_t s = 0; s < num_spans; ++s) {
    for (std::size_t begin = 0; begin < spans[s].numel; begin += kTile) {
      const std::size_t end = std::min(begin + kTile, spans[s].numel);
      tiles.push_back({spans[s], position, begin, end, wanted});
    }
    position += hashed_items(spans[s].numel);
  }
  const auto run = kStatsTile.at(level);
  workers.for_each_tile(tiles.size(), [&](std::size_t i) {
    const ExactFloatMode mode;
    run(tiles[i]);
  });
  UpdateStats stats;
  for (const StatsTile& tile : tiles) {  // in the order of the tiles, whoever ran them
    stats.grad_sq_norm += tile.sum;
    stats.grad_hash += tile.hash;
  }
  stats.non_finite = !std::isfinite(stats.grad_sq_norm);
  return stats;
}

}  // namespace

UpdateStats squared_norm(const void* values, DType dtype, std::size_t numel, Workers& workers,
                         CpuLevel level) {
  require_supported(level, "squared_norm");
  const GradSpan span = {values, dtype, numel};
  return stats_of(&span, 1, workers, level, {.norm = true, .hash = nullptr});
}

UpdateStats gradient_stats(const GradSpan* spans, std::size_t num_spans, Workers& workers,
                           CpuLevel level) {
  require_supported(level, "gradient_stats");
  return stats_of(spans, num_spans, workers, level, {.norm = true, .hash = hash_function(level)});
}

ContentHash content_hash(const GradSpan* spans, std::size_t num_spans, Workers& workers,
                         CpuLevel level) {
  require_supported(level, "content_hash");
  return stats_of(spans, num_spans, workers, level, {.norm = false, .hash = hash_function(level)})
      .grad_hash;
}

}  // namespace autohete
