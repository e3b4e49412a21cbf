// The arithmetic of SGD with momentum, written once; sgd.cpp compiles it for each instruction set.
#pragma once

#include <array>
#include <cstddef>

#include "csrc/kernels/finite.h"
#include "csrc/kernels/levels.h"
#include "csrc/kernels/sgd.h"
#include "csrc/kernels/update_tile.h"

namespace autohete {

// Each computed in double and rounded to float once.
struct SgdCoefficients {
  float lr;
  float grad_scale;  // negative when maximizing
  float weight_decay;
  float momentum, one_minus_momentum;
  float gain;  // 1 - dampening; 1 for the first step
  bool nesterov, first;

  explicit SgdCoefficients(const SgdSpan& span)
      : lr(static_cast<float>(span.hyper.lr)),
        grad_scale(static_cast<float>(span.hyper.maximize ? -span.hyper.grad_scale
                                                          : span.hyper.grad_scale)),
        weight_decay(static_cast<float>(span.hyper.weight_decay)),
        momentum(static_cast<float>(span.hyper.momentum)),
        one_minus_momentum(static_cast<float>(1 - span.hyper.momentum)),
        gain(static_cast<float>(span.first ? 1.0 : 1 - span.hyper.dampening)),
        nesterov(span.hyper.nesterov),
        first(span.first) {}
};

// momentum x buffer + gain x gradient, the buffer moved by a correction where that is the small one
// (adamw_loop.h says why).
AH_INLINE float next_momentum(const SgdCoefficients& c, float buffer, float grad) {
  const float gain = c.gain * grad;
  if (c.one_minus_momentum > 0 && c.one_minus_momentum < 0.5f) {
    return buffer + (gain - c.one_minus_momentum * at_most_finite(buffer));
  }
  return c.momentum * buffer + gain;
}

struct SgdRule {
  using Span = SgdSpan;
  using Coefficients = SgdCoefficients;
  static constexpr std::size_t kStates = 1;
  using Block = UpdateBlock<kStates>;

  static bool same_coefficients(const Span& a, const Span& b) {
    return a.hyper == b.hyper && a.first == b.first;
  }

  static AH_INLINE std::array<StateStream, kStates> states(const SgdSpan& span) {
    const bool momentum = span.hyper.momentum != 0;
    return {{{momentum ? span.momentum_in : nullptr, span.momentum_out}}};
  }

  static AH_INLINE void apply(const SgdCoefficients& coefficients, const Block& at, std::size_t n) {
    const SgdCoefficients c = coefficients;
    const float *grad = at.grad, *param = at.param, *momentum = at.state[0];
    float *param_out = at.param_out, *momentum_out = at.state_out[0];
    if (momentum == nullptr) {
      AH_INDEPENDENT
      for (std::size_t i = 0; i < n; ++i) {
        param_out[i] = param[i] - c.lr * scaled(c, grad[i], param[i]);
      }
      return;
    }
    AH_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) {
      const float p = param[i];
      const float g = scaled(c, grad[i], p);
      const float before = momentum[i];
      const float buffer = c.first ? g : next_momentum(c, before, g);
      momentum_out[i] = buffer;
      param_out[i] = p - c.lr * (c.nesterov ? g + c.momentum * buffer : buffer);
    }
  }

 private:
  static AH_INLINE float scaled(const SgdCoefficients& c, float grad, float param) {
    const float g = grad * c.grad_scale;
    return c.weight_decay == 0 ? g : g + c.weight_decay * param;
  }
};

}  // namespace autohete
