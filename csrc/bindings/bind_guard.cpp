// Changing the classes of many tensors at once: guards are put on and taken off in every pass.
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace autohete {

namespace py = pybind11;

namespace {

void change_one(PyObject* tensor, const py::type& from, const py::type& to) {
  if (Py_IS_TYPE(tensor, reinterpret_cast<PyTypeObject*>(from.ptr()))) {
    if (PyObject_SetAttrString(tensor, "__class__", to.ptr()) != 0) throw py::error_already_set();
  }
}

void change_class(const py::list& tensors, const py::type& from, const py::type& to) {
  for (const py::handle tensor : tensors) change_one(tensor.ptr(), from, to);
}

bool change_class_of_gradients(const py::list& parameters, const py::type& from,
                               const py::type& to) {
  bool all = true;
  for (const py::handle parameter : parameters) {
    if (!THPVariable_Check(parameter.ptr())) throw py::type_error("expected a list of tensors");
    const at::Tensor& gradient = THPVariable_Unpack(parameter.ptr()).grad();
    if (!gradient.defined()) continue;
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
    change_one(object.ptr(), from, to);
    all = all && Py_IS_TYPE(object.ptr(), reinterpret_cast<PyTypeObject*>(to.ptr()));
  }
  return all;
}

}  // namespace

void bind_guard(py::module_& module) {
  module.def("change_class", &change_class, py::arg("tensors"), py::arg("source"),
             py::arg("target"),
             "Make tensors whose class is exactly `source` instances of `target`; others stay.");
  module.def("change_class_of_gradients", &change_class_of_gradients, py::arg("parameters"),
             py::arg("source"), py::arg("target"),
             "The same for the gradients they have now. Returns whether all are of it then.");
}

}  // namespace autohete
