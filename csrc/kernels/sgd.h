// SGD with momentum in one pass over memory, on the host: torch.optim.SGD's rule.
#pragma once

#include "csrc/kernels/update.h"

namespace autohete {

struct SgdHyper {
  double lr, momentum, dampening, weight_decay;  // L2
  bool nesterov = false;
  bool maximize = false;
  double grad_scale = 1.0;  // the gradient is multiplied by this before use
  bool operator==(const SgdHyper&) const = default;
};

struct SgdSpan : UpdateSpan {
  // numel items of state_dtype; null where momentum is 0.
  const void* momentum_in = nullptr;
  void* momentum_out = nullptr;
  // The buffer holds nothing yet: it becomes the gradient, without dampening, and momentum_in is
  // not looked at (it has to be an address all the same).
  bool first = false;
  SgdHyper hyper{};
};

}  // namespace autohete
