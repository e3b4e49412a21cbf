// What an update does around its tiles, the same for every rule: check, cut, run, add up.
#pragma once

#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/kernels/float_mode.h"
#include "csrc/kernels/kernels.h"
#include "csrc/kernels/update_tile.h"
#include "csrc/runtime/workers.h"

namespace autohete {

// From this many bytes written in one call on, destinations that were not read bypass the caches.
constexpr std::size_t kStreamBytes = std::size_t{32} << 20;

// How many tiles are done between two calls of `between`: 4 million items.
constexpr std::size_t kTilesOfAPiece = 128;

inline void require_given(const char* where, const char* name, const void* pointer) {
  require(pointer != nullptr, where, ": ", name, " is null, expected an address");
}

inline void require_finite(const char* where, const char* name, double value) {
  require(std::isfinite(value), where, ": ", name, " is ", value, ", expected a finite number");
}

inline void require_fraction(const char* where, const char* name, double value) {
  require(value >= 0 && value < 1, where, ": ", name, " is ", value, ", expected 0 <= ", name,
          " < 1");
}

// The part of a span that all rules have; `numel` > 0.
inline void check_common(const char* where, const UpdateSpan& span) {
  require_given(where, "grad", span.grad);
  require_given(where, "param_in", span.param_in);
  require_given(where, "param_out", span.param_out);
  require(
      (span.half_in == nullptr && span.half_out == nullptr) || span.half_dtype != DType::kFloat32,
      where, ": half_dtype is float32, expected bfloat16 or float16");
  require(span.state_dtype != DType::kFloat16, where,
          ": state_dtype is float16, expected float32 or bfloat16");
}

inline void check_step(const char* where, double step) {
  require(step >= 1 && std::isfinite(step), where, ": step is ", step,
          ", expected the number of this update, 1 for the first");
}

template <typename Rule>
std::vector<UpdateTile<Rule>> cut(const typename Rule::Span* spans,
                                  const std::vector<typename Rule::Coefficients>& coefficients,
                                  CpuLevel level, bool by_products,
                                  const std::uint64_t* positions) {
  std::size_t numel = 0;
  for (std::size_t s = 0; s < coefficients.size(); ++s) numel += spans[s].numel;
  const bool large = numel * 3 * sizeof(float) >= kStreamBytes;
  const StreamCopy stream = large ? stream_copy_function(level) : nullptr;
  const Wanted wanted = {by_products, by_products ? hash_function(level) : nullptr};
  std::vector<UpdateTile<Rule>> tiles;
  std::uint64_t position = 0;
  for (std::size_t s = 0; s < coefficients.size(); ++s) {
    if (positions) position = positions[s];
    for (std::size_t begin = 0; begin < spans[s].numel; begin += kTile) {
      const std::size_t end = std::min(begin + kTile, spans[s].numel);
      tiles.push_back({&spans[s], &coefficients[s], position, begin, end, stream, wanted});
    }
    position += hashed_items(spans[s].numel);
  }
  for (std::size_t i = 1; i < tiles.size(); ++i) tiles[i - 1].next = &tiles[i];
  return tiles;
}

// Where the workers' tasks begin in tiles [begin, end), with `end` behind the last: tiles of small
// tensors that follow each other are one task, of at most kTile items (measured: 1000 tensors of
// 10,000 items 1 to 3 %).
template <typename Tile>
std::vector<std::size_t> tasks_of(const std::vector<Tile>& tiles, std::size_t begin,
                                  std::size_t end) {
  std::vector<std::size_t> first;
  std::size_t items = kTile;
  for (std::size_t i = begin; i < end; ++i) {
    items += tiles[i].end - tiles[i].begin;
    if (items > kTile) {
      first.push_back(i);
      items = tiles[i].end - tiles[i].begin;
    }
  }
  first.push_back(end);
  return first;
}

template <typename Rule, typename Run>
void run_tiles(std::vector<UpdateTile<Rule>>& tiles, Workers& workers, Run run,
               const std::function<void(std::size_t)>& between,
               const std::function<void()>& beside) {
  const std::size_t piece = between ? kTilesOfAPiece : tiles.size();
  for (std::size_t begin = 0; begin < tiles.size(); begin += piece) {
    const std::size_t count = std::min(piece, tiles.size() - begin);
    const auto first = tasks_of(tiles, begin, begin + count);
    const std::size_t num_tasks = first.size() - 1;
    // A task of its own, the first, unless nobody else would work meanwhile.
    const std::size_t ahead = begin == 0 && beside && num_tasks > 1 ? 1 : 0;
    workers.for_each_tile(num_tasks + ahead, [&](std::size_t task) {
      if (task < ahead) return beside();
      const ExactFloatMode mode;
      for (std::size_t i = first[task - ahead]; i < first[task - ahead + 1]; ++i) run(tiles[i]);
    });
    if (begin == 0 && beside && ahead == 0) beside();
    if (begin + count == tiles.size()) return;
    std::size_t written = 0;
    for (std::size_t i = begin; i < begin + count; ++i) written += tiles[i].end - tiles[i].begin;
    between(written);
  }
}

// `check` throws for a span that cannot be updated, before anything is written.
template <typename Rule, typename Check>
UpdateStats run_update(const char* where, const typename Rule::Span* spans, std::size_t num_spans,
                       Workers& workers, CpuLevel level, bool by_products,
                       const LevelTable<UpdateTile<Rule>>& table, const Check& check,
                       const std::function<void(std::size_t)>& between = nullptr,
                       const std::function<void()>& beside = nullptr,
                       const std::uint64_t* positions = nullptr) {
  require_supported(level, where);
  std::vector<typename Rule::Coefficients> coefficients;
  coefficients.reserve(num_spans);
  for (std::size_t s = 0; s < num_spans; ++s) {
    check(spans[s]);
    if (s > 0 && Rule::same_coefficients(spans[s - 1], spans[s])) {
      coefficients.push_back(coefficients.back());
    } else {
      coefficients.emplace_back(spans[s]);
    }
  }
  auto tiles = cut<Rule>(spans, coefficients, level, by_products, positions);
  if (tiles.empty() && beside) beside();
  run_tiles<Rule>(tiles, workers, table.at(level), between, beside);
  UpdateStats stats;
  for (const auto& tile : tiles) {  // in the order of the tiles, whoever ran them
    stats.grad_sq_norm += tile.grad_sq_sum;
    stats.grad_hash += tile.grad_hash;
    stats.edited += tile.edited;
  }
  stats.non_finite = !std::isfinite(stats.grad_sq_norm);
  return stats;
}

}  // namespace autohete
