// The Python module autohete._C. Each bind_*.cpp adds its own part; this file only calls them.
#include <pybind11/pybind11.h>

namespace autohete {
void bind_cuda(pybind11::module_& module);
void bind_guard(pybind11::module_& module);
void bind_ops(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_runtime(pybind11::module_& module);
void bind_streams(pybind11::module_& module);
void bind_updates(pybind11::module_& module);
}  // namespace autohete

PYBIND11_MODULE(_C, module) {
  module.doc() = "autohete's C++ core";
  autohete::bind_guard(module);
  autohete::bind_ops(module);
  autohete::bind_updates(module);
  autohete::bind_streams(module);
  autohete::bind_plan(module);
  autohete::bind_runtime(module);
  autohete::bind_cuda(module);
}
