// Where the streams of one update begin, so that they do not meet in the caches.
//
// An update walks its tensors side by side. The same part of all that begin at the same place of a
// large page falls into the same sets of the caches (measured: docs/results/adamw.md). So those
// that are large begin at least kStreamStep from each other, counted within a large page.
// Arithmetic only; who maps memory or lays out a block asks here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "csrc/base/check.h"

namespace autohete {

inline constexpr std::size_t kLargePage = std::size_t{2} << 20;

// Three small pages and four cache lines: what a kernel reads of one stream at a time.
inline constexpr std::size_t kStreamStep = 3 * 4096 + 256;

// Streams of fewer bytes begin where they come to lie.
inline constexpr std::size_t kLargeStreamBytes = kLargePage;

// Bytes between two places of a large page, the shorter way round.
constexpr std::size_t place_distance(std::size_t a, std::size_t b) {
  const std::size_t ahead = (a - b) % kLargePage;
  return std::min(ahead, kLargePage - ahead);
}

// The first place from `at` on, a multiple of `alignment` (at most 4096, a power of two), that is
// kStreamStep or more from each of `others` (addresses, or offsets behind a large page's
// beginning; at most 64).
inline std::size_t place_apart(std::size_t at, std::size_t alignment,
                               const std::vector<std::size_t>& others) {
  AH_ASSERT(others.size() <= 64);  // with those the page is never full
  const auto is_near = [&](std::size_t other) { return place_distance(at, other) < kStreamStep; };
  const auto align = [&] { at = (at + alignment - 1) / alignment * alignment; };
  align();
  for (auto other = others.begin(); other != others.end();) {
    other = std::find_if(others.begin(), others.end(), is_near);
    if (other == others.end()) break;
    at += (*other + kStreamStep - at) % kLargePage;  // just behind it
    align();
  }
  return at;
}

}  // namespace autohete
