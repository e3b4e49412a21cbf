// What the sources of TorchUnit share.
#pragma once

#include <ATen/core/Tensor.h>

#include "csrc/bindings/torch_unit.h"
#include "csrc/kernels/update.h"

namespace autohete {

// Throws std::invalid_argument where it cannot be updated.
DType to_dtype(at::ScalarType type);

// The gradient as one contiguous range in the parameter's own layout. One that stands in a block is
// another parameter's (p.grad = q.grad): its bytes may be overwritten there before they are read.
at::Tensor exclusive_gradient(const at::Tensor& parameter, const at::Tensor& gradient);

// Somebody may know the present memory of a parameter or of state by address, and is still there.
// (A NumPy array of the tensor itself counts for ever: nothing tells its end.)
bool is_known(const HomedTensor& home);

// Before the tensor may be pointed elsewhere: what somebody knows by address stays mapped.
void keep_or_forget(HomedTensor& home, bool moves);

// Somebody may know the memory of the gradient that has landed by other means than the tensor.
bool is_landed_held(const TorchParameter& parameter);

}  // namespace autohete
