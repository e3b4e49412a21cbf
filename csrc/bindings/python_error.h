// Errors of Python functions that are called on the engine's threads. The engine keeps an error and
// throws it to everybody who asks; pybind11's error_already_set can be raised once only, and ends
// the process the second time.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>

namespace autohete {

// A Python exception that may be raised any number of times.
class PythonError : public std::runtime_error {
 public:
  // With the GIL held.
  explicit PythonError(pybind11::error_already_set& error)
      : std::runtime_error(error.what()), value_(new pybind11::object(error.value()), &forget) {}

  // With the GIL held.
  void set() const {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value_->ptr())), value_->ptr());
  }

 private:
  static void forget(pybind11::object* value) {
    if (!Py_IsInitialized()) return;  // at exit, it is the process's
    const pybind11::gil_scoped_acquire gil;
    delete value;
  }

  std::shared_ptr<pybind11::object> value_;
};

// Calls what calls Python, from a thread of the engine's.
template <typename Call>
void call_python(const Call& call) {
  const pybind11::gil_scoped_acquire gil;
  try {
    call();
  } catch (pybind11::error_already_set& error) {
    throw PythonError(error);
  }
}

}  // namespace autohete
