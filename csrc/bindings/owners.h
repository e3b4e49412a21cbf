// Who else has a tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace autohete {

// Whether nobody has the tensor but `num_owners` C++ owners (the argument's own is one of them):
// no other C++ owner, and no Python code. With the GIL.
//
// How much of a count is its Python object differs between versions of torch (from 2.10 on an
// object counts as an owner for as long as the tensor lives), so it is compared with a tensor that
// is known to be alone.
bool is_alone(const at::Tensor& tensor, std::size_t num_owners);

}  // namespace autohete
