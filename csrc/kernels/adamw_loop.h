// The arithmetic of AdamW and Adam, written once; adamw.cpp compiles it for each instruction set.
//
// Each moment and the parameter move as `base + (correction)`, with a correction that is small
// beside the base, so each is rounded once per step at its own size, and a coefficient such as
// 1 - 0.999 enters as the nearest float of that small number. Written the usual way, 0.999f * v
// carries the rounding of 0.999f itself, in the same direction every step: 100 steps of it are the
// 50 to 100 ulp that other kernels are off by. Where a coefficient is past one half the other form
// is the exact one (beta = 0 must give the gradient itself), so the form is chosen by value.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>

#include "csrc/kernels/adamw.h"
#include "csrc/kernels/finite.h"
#include "csrc/kernels/levels.h"
#include "csrc/kernels/update_tile.h"

namespace autohete {

// The hyper-parameters as the loop needs them, each computed in double from the values and the
// step number alone and rounded to float once.
struct AdamCoefficients {
  float grad_scale;  // negative when maximizing
  float l2;          // weight decay added to the gradient; 0 when decoupled
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float decay;  // lr x decoupled weight decay
  float one_minus_decay;
  float step_size;       // lr / (1 - beta1^step)
  float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  bool common;  // no L2, and betas and decay on the usual side of one half

  explicit AdamCoefficients(const AdamSpan& span) : AdamCoefficients(span.hyper, span.step) {}

  AdamCoefficients(const AdamHyper& hyper, double step)
      : grad_scale(static_cast<float>(hyper.maximize ? -hyper.grad_scale : hyper.grad_scale)),
        l2(static_cast<float>(hyper.decoupled_decay ? 0.0 : hyper.weight_decay)),
        beta1(static_cast<float>(hyper.beta1)),
        beta2(static_cast<float>(hyper.beta2)),
        one_minus_beta1(static_cast<float>(1 - hyper.beta1)),
        one_minus_beta2(static_cast<float>(1 - hyper.beta2)) {
    const double decay64 = hyper.decoupled_decay ? hyper.lr * hyper.weight_decay : 0.0;
    decay = static_cast<float>(decay64);
    one_minus_decay = static_cast<float>(1 - decay64);
    step_size = static_cast<float>(hyper.lr / (1 - std::pow(hyper.beta1, step)));
    inv_sqrt_bias2 = static_cast<float>(1 / std::sqrt(1 - std::pow(hyper.beta2, step)));
    eps = static_cast<float>(hyper.eps);
    common = l2 == 0 && one_minus_beta1 < 0.5f && one_minus_beta2 < 0.5f && decay < 0.5f;
  }
};

// exp_avg + (1 - beta1) (grad - exp_avg), as torch's lerp forms it.
template <bool common>
AH_INLINE float next_exp_avg(const AdamCoefficients& c, float exp_avg, float grad) {
  if (common || c.one_minus_beta1 < 0.5f) return exp_avg + c.one_minus_beta1 * (grad - exp_avg);
  return grad - c.beta1 * (grad - exp_avg);
}

// beta2 exp_avg_sq + (1 - beta2) grad^2. The factor comes first, as in torch: grad^2 alone
// overflows sooner.
template <bool common>
AH_INLINE float next_exp_avg_sq(const AdamCoefficients& c, float exp_avg_sq, float grad) {
  const float gain = (c.one_minus_beta2 * grad) * grad;
  if (common || c.one_minus_beta2 < 0.5f) {
    return exp_avg_sq + (gain - c.one_minus_beta2 * at_most_finite(exp_avg_sq));
  }
  return c.beta2 * exp_avg_sq + gain;
}

template <bool common>
AH_INLINE float next_param(const AdamCoefficients& c, float param, float change) {
  if (common || c.decay < 0.5f) return param - (c.decay * at_most_finite(param) + change);
  return c.one_minus_decay * param - change;
}

struct AdamRule {
  using Span = AdamSpan;
  using Coefficients = AdamCoefficients;
  static constexpr std::size_t kStates = 3;
  using Block = UpdateBlock<kStates>;

  static bool same_coefficients(const Span& a, const Span& b) {
    return a.hyper == b.hyper && a.step == b.step;
  }

  static AH_INLINE std::array<StateStream, kStates> states(const AdamSpan& span) {
    const bool amsgrad = span.hyper.amsgrad;
    return {{{span.exp_avg_in, span.exp_avg_out},
             {span.exp_avg_sq_in, span.exp_avg_sq_out},
             {amsgrad ? span.max_exp_avg_sq_in : nullptr, span.max_exp_avg_sq_out}}};
  }

  static AH_INLINE void apply(const AdamCoefficients& c, const Block& at, std::size_t n) {
    if (at.state[2] != nullptr) {
      apply_as<false, true>(c, at, n);
    } else if (c.common) {
      apply_as<true, false>(c, at, n);
    } else {
      apply_as<false, false>(c, at, n);
    }
  }

 private:
  template <bool common, bool amsgrad>
  static AH_INLINE void apply_as(const AdamCoefficients& coefficients, const Block& at,
                                 std::size_t n) {
    const AdamCoefficients c = coefficients;
    const float *grad = at.grad, *param = at.param, *exp_avg = at.state[0];
    const float *exp_avg_sq = at.state[1], *max_exp_avg_sq = at.state[2];
    float *param_out = at.param_out, *exp_avg_out = at.state_out[0];
    float *exp_avg_sq_out = at.state_out[1], *max_exp_avg_sq_out = at.state_out[2];
    AH_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) {
      const float p = param[i];
      float g = grad[i] * c.grad_scale;
      if (!common) g = c.l2 == 0 ? g : g + c.l2 * p;
      const float m = next_exp_avg<common>(c, exp_avg[i], g);
      const float v = next_exp_avg_sq<common>(c, exp_avg_sq[i], g);
      float largest = v;
      if (amsgrad) {
        const float before = max_exp_avg_sq[i];
        largest = before >= v || before != before ? before : v;  // NaN wins, as in torch.maximum
        max_exp_avg_sq_out[i] = largest;
      }
      const float denominator = std::sqrt(largest) * c.inv_sqrt_bias2 + c.eps;
      exp_avg_out[i] = m;
      exp_avg_sq_out[i] = v;
      param_out[i] = next_param<common>(c, p, c.step_size * m / denominator);
    }
  }
};

}  // namespace autohete
