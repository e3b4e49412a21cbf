// A tensor argument at the border: unpacked and checked, with messages that name it.
//
// Tensors are unpacked through torch's C interface: torch/extension.h would cost a minute to
// compile. Everything here needs the GIL and throws std::invalid_argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>

#include "csrc/base/check.h"
#include "csrc/base/cpu_features.h"
#include "csrc/kernels/update.h"

namespace autohete {

namespace py = pybind11;

// A tensor argument with the words to speak of it.
struct Argument {
  const char* where;
  const char* name;
  at::Tensor tensor;

  // Callers test first: what goes into the message is costly to make for every tensor.
  template <typename Got>
  [[noreturn]] void refuse(const Got& got, const char* wanted) const {
    throw std::invalid_argument(concat(where, ": ", name, " is ", got, ", expected ", wanted));
  }
};

inline Argument unpack(const char* where, const char* name, py::handle object) {
  Argument argument = {where, name, {}};
  if (!THPVariable_Check(object.ptr())) {
    argument.refuse(py::str(py::type::handle_of(object)).cast<std::string>(), "a tensor");
  }
  argument.tensor = THPVariable_Unpack(object.ptr());
  const at::Tensor& tensor = argument.tensor;
  if (!tensor.device().is_cpu()) argument.refuse(tensor.device().str(), "a tensor on cpu");
  if (tensor.layout() != at::kStrided) argument.refuse(tensor.layout(), "a dense (strided) tensor");
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    argument.refuse("a wrapper without memory of its own", "a plain tensor");
  }
  if (tensor.is_neg() || tensor.is_conj()) {
    argument.refuse("a view whose memory holds negated or conjugated values",
                    "its own values; call resolve_neg() or resolve_conj()");
  }
  return argument;
}

// An argument that is no tensor.
template <typename T>
T value_of(const char* where, const char* name, py::handle object, const char* wanted) {
  if (!object.is_none()) {
    try {
      return object.cast<T>();
    } catch (const py::cast_error&) {  // said below
    }
  }
  throw std::invalid_argument(concat(where, ": ", name, " is ",
                                     py::repr(object).cast<std::string>(), ", expected ", wanted));
}

inline DType dtype_of(const Argument& argument) {
  switch (argument.tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      argument.refuse(argument.tensor.scalar_type(), "float32, bfloat16 or float16");
  }
}

inline const float* fp32(const Argument& argument) {
  if (argument.tensor.scalar_type() != at::kFloat)
    argument.refuse(argument.tensor.scalar_type(), "float32");
  return static_cast<const float*>(argument.tensor.const_data_ptr());
}

inline float* mutable_fp32(const Argument& argument) {
  fp32(argument);
  return static_cast<float*>(argument.tensor.mutable_data_ptr());
}

// Both are walked as flat memory, so element i of one must be element i of the other.
inline void require_same_layout(const Argument& argument, const Argument& model) {
  const at::Tensor &a = argument.tensor, &b = model.tensor;
  require(a.sizes() == b.sizes(), argument.where, ": ", argument.name, " has shape ", a.sizes(),
          ", expected ", model.name, "'s ", b.sizes());
  const bool both_contiguous = a.is_contiguous() && b.is_contiguous();
  require(both_contiguous || (a.is_non_overlapping_and_dense() && a.strides() == b.strides()),
          argument.where, ": ", argument.name, " has strides ", a.strides(),
          ", expected dense ones "
          "equal to ",
          model.name, "'s ", b.strides(), "; make it contiguous");
}

struct Range {
  const char* begin;
  const char* end;
  const char* name;
};

inline Range range_of(const Argument& argument) {
  const auto* begin = static_cast<const char*>(argument.tensor.const_data_ptr());
  return {begin, begin + argument.tensor.nbytes(), argument.name};
}

inline void require_disjoint(const char* where, const Range& a, const Range& b) {
  require(a.end <= b.begin || b.end <= a.begin, where, ": ", a.name, " overlaps ", b.name,
          ", expected separate memory");
}

// The level a caller named, or the one in use.
inline CpuLevel level_from(const std::optional<std::string>& name, const char* where) {
  return name ? parse_cpu_level(*name, where) : cpu_level();
}

// Written behind autograd's back, so it has to be told, as an in-place operation would.
inline void bump(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace autohete
