// Sum of squares in double, in an order that no instruction set and no thread count changes.
#pragma once

#include <cstddef>

#include "csrc/kernels/levels.h"
#include "csrc/kernels/tile.h"

namespace autohete {

// One running sum for each place of two blocks: an elementwise loop, which vectorises without
// reordering anything. The square of an fp32 value is exact in double.
struct SquareSum {
  static constexpr std::size_t kPlaces = 2 * kBlock;
  alignas(64) double sums[kPlaces] = {};

  // `at` is a multiple of kBlock: where the block begins.
  AH_INLINE void add(const float* values, std::size_t at, std::size_t n) {
    double* places = sums + at % kPlaces;
    AH_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) {
      const double value = values[i];
      places[i] += value * value;
    }
  }

  AH_INLINE double total() {
    for (std::size_t width = kPlaces / 2; width > 0; width /= 2) {
      AH_INDEPENDENT
      for (std::size_t i = 0; i < width; ++i) sums[i] += sums[i + width];
    }
    return sums[0];
  }
};

}  // namespace autohete
