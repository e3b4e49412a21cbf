// The Python module autohete._C. Each bind_*.cpp adds its own part; this file only calls them.
#include <pybind11/pybind11.h>

namespace autohete {
// Weak while the parts are being built side by side: a part that is not there yet is left out.
__attribute__((weak)) void bind_ops(pybind11::module_& module);
__attribute__((weak)) void bind_plan(pybind11::module_& module);
__attribute__((weak)) void bind_runtime(pybind11::module_& module);
}  // namespace autohete

PYBIND11_MODULE(_C, module) {
  module.doc() = "autohete's C++ core";
  if (autohete::bind_ops) autohete::bind_ops(module);
  if (autohete::bind_plan) autohete::bind_plan(module);
  if (autohete::bind_runtime) autohete::bind_runtime(module);
}
