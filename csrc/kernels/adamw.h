// AdamW / Adam in one pass over memory, on the host.
//
// The rule is torch.optim.AdamW's (Loshchilov and Hutter, arXiv 1711.05101) or, with
// `decoupled_decay` off, torch.optim.Adam's L2. Gradients are read once, scaled, and the
// parameter, both moments and (in the half regime) the half copy are written once.
#pragma once

#include "csrc/kernels/update.h"

namespace autohete {

struct AdamHyper {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled_decay = true;  // AdamW; false: Adam with L2
  bool maximize = false;
  bool amsgrad = false;
  // Gradient is multiplied by this before use: 1 / loss scale x clip factor.
  double grad_scale = 1.0;
  bool operator==(const AdamHyper&) const = default;
};

// numel items of state_dtype each; bias correction is computed in double from `step`.
struct AdamSpan : UpdateSpan {
  const void* exp_avg_in = nullptr;
  const void* exp_avg_sq_in = nullptr;
  const void* max_exp_avg_sq_in = nullptr;  // amsgrad only, which needs fp32 state
  void* exp_avg_out = nullptr;
  void* exp_avg_sq_out = nullptr;
  void* max_exp_avg_sq_out = nullptr;
  AdamHyper hyper{};
};

}  // namespace autohete
