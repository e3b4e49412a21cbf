// Who else has a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace autohete {

// Whether nobody has the tensor but `num_owners` C++ owners (the argument's own is one of them):
// no other C++ owner, and no Python code. With the GIL.
//
// What a Python object adds to the counts is torch's own affair (in 2.13 it is an owner for as long
// as the tensor lives), so they are compared with those of a tensor that is known to be alone.
bool is_alone(const at::Tensor& tensor, std::size_t num_owners);

// The same, but Python code may have it. Other C++ owners may know its memory by address: a DLPack
// capsule does.
bool is_alone_in_cpp(const at::Tensor& tensor, std::size_t num_owners);

}  // namespace autohete
