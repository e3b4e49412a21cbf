#include "csrc/bindings/owners.h"

#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace autohete {
namespace {

struct Owners {
  std::size_t in_cpp;
  Py_ssize_t in_python;
};

// Both with the Python object there, which is made where it is not, and in hand.
Owners count(const at::Tensor& tensor) {
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
  return {tensor.use_count(), Py_REFCNT(object.ptr())};
}

// Those of a tensor that its one C++ owner alone has.
const Owners& nobody_else() {
  static const Owners alone = [] {
    const at::Tensor nobodys = at::empty({0});
    count(nobodys);  // the object is there, as that of a tensor is that was looked at before
    return count(nobodys);
  }();
  return alone;
}

}  // namespace

bool is_alone(const at::Tensor& tensor, std::size_t num_owners) {
  return count(tensor).in_python == nobody_else().in_python && is_alone_in_cpp(tensor, num_owners);
}

bool is_alone_in_cpp(const at::Tensor& tensor, std::size_t num_owners) {
  return count(tensor).in_cpp == nobody_else().in_cpp + num_owners - 1;
}

}  // namespace autohete
