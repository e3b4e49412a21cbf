// The arithmetic of Lion, written once; lion.cpp compiles it for each instruction set.
#pragma once

#include <array>
#include <cstddef>

#include "csrc/kernels/finite.h"
#include "csrc/kernels/levels.h"
#include "csrc/kernels/lion.h"
#include "csrc/kernels/update_tile.h"

namespace autohete {

// Each computed in double and rounded to float once.
struct LionCoefficients {
  float lr;
  float grad_scale;  // negative when maximizing
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float decay;  // lr x weight decay
  float one_minus_decay;

  explicit LionCoefficients(const LionSpan& span)
      : lr(static_cast<float>(span.hyper.lr)),
        grad_scale(static_cast<float>(span.hyper.maximize ? -span.hyper.grad_scale
                                                          : span.hyper.grad_scale)),
        beta1(static_cast<float>(span.hyper.beta1)),
        one_minus_beta1(static_cast<float>(1 - span.hyper.beta1)),
        beta2(static_cast<float>(span.hyper.beta2)),
        one_minus_beta2(static_cast<float>(1 - span.hyper.beta2)),
        decay(static_cast<float>(span.hyper.lr * span.hyper.weight_decay)),
        one_minus_decay(static_cast<float>(1 - span.hyper.lr * span.hyper.weight_decay)) {}
};

struct LionRule {
  using Span = LionSpan;
  using Coefficients = LionCoefficients;
  static constexpr std::size_t kStates = 1;
  using Block = UpdateBlock<kStates>;

  static bool same_coefficients(const Span& a, const Span& b) { return a.hyper == b.hyper; }

  static AH_INLINE std::array<StateStream, kStates> states(const LionSpan& span) {
    return {{{span.exp_avg_in, span.exp_avg_out}}};
  }

  static AH_INLINE void apply(const LionCoefficients& coefficients, const Block& at,
                              std::size_t n) {
    const LionCoefficients c = coefficients;
    const float *grad = at.grad, *param = at.param, *exp_avg = at.state[0];
    float *param_out = at.param_out, *exp_avg_out = at.state_out[0];
    AH_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) {
      const float p = param[i], m = exp_avg[i];
      const float g = grad[i] * c.grad_scale;
      const float change = c.lr * sign(mean(m, g, c.beta1, c.one_minus_beta1));
      exp_avg_out[i] = mean(m, g, c.beta2, c.one_minus_beta2);
      param_out[i] = c.decay < 0.5f ? p - (c.decay * at_most_finite(p) + change)
                                    : c.one_minus_decay * p - change;
    }
  }

 private:
  // The mean moved by a correction where that is the small one (adamw_loop.h says why).
  static AH_INLINE float mean(float m, float g, float beta, float one_minus_beta) {
    return one_minus_beta < 0.5f ? m + one_minus_beta * (g - at_most_finite(m))
                                 : beta * m + one_minus_beta * g;
  }

  // NaN stays NaN: a step that went wrong is to be seen.
  static AH_INLINE float sign(float value) {
    const float one = value > 0 ? 1.0f : -1.0f;
    return value == 0 || value != value ? value : one;
  }
};

}  // namespace autohete
