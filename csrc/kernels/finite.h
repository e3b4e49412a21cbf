// Arithmetic that keeps infinite values what they are.
#pragma once

#include <limits>

#include "csrc/kernels/levels.h"

namespace autohete {

// An infinite value has to stay infinite, as in torch, and inf - inf would make it NaN: the
// correction is computed from the largest finite value instead. NaN stays NaN through the base.
AH_INLINE float at_most_finite(float value) {
  constexpr float kMax = std::numeric_limits<float>::max();
  const float low = value < kMax ? value : kMax;
  return low > -kMax ? low : -kMax;
}

}  // namespace autohete
