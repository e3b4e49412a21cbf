// Lion in one pass over memory, on the host (Chen et al., arXiv 2302.06675, algorithm 2).
//
//   c = beta1 m + (1 - beta1) g;  p = p - lr (sign(c) + weight_decay p);  m = beta2 m + (1 - beta2)
//   g
#pragma once

#include "csrc/kernels/update.h"

namespace autohete {

struct LionHyper {
  double lr, beta1, beta2, weight_decay;  // decoupled
  bool maximize = false;
  double grad_scale = 1.0;  // the gradient is multiplied by this before use
  bool operator==(const LionHyper&) const = default;
};

struct LionSpan : UpdateSpan {
  const void* exp_avg_in = nullptr;  // numel items of state_dtype
  void* exp_avg_out = nullptr;
  LionHyper hyper{};
};

}  // namespace autohete
