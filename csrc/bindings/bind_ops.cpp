// Tensor operations of the kernels. Everything a caller can get wrong is checked here, once.
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/cpu_count.h"
#include "csrc/base/cpu_features.h"
#include "csrc/bindings/tensor_argument.h"
#include "csrc/device/file_pages.h"
#include "csrc/kernels/kernels.h"
#include "csrc/runtime/workers.h"

namespace autohete {
namespace {

UpdateStats squared_norm_(Workers& workers, py::handle values,
                          const std::optional<std::string>& level_name) {
  const Argument argument = unpack("squared_norm", "values", values);
  const DType dtype = dtype_of(argument);
  if (!argument.tensor.is_non_overlapping_and_dense())
    argument.refuse(argument.tensor.strides(), "dense strides");
  const CpuLevel level = level_from(level_name, "squared_norm");
  py::gil_scoped_release release;
  return squared_norm(argument.tensor.const_data_ptr(), dtype, argument.tensor.numel(), workers,
                      level);
}

// Tensors to look at, in their order in memory; `held` keeps them while the GIL is away.
struct GradCall {
  std::vector<GradSpan> spans;
  std::vector<at::Tensor> held;

  GradCall(const char* where, const py::list& tensors) {
    for (const py::handle item : tensors) {
      const Argument argument = unpack(where, "tensors", item);
      const DType dtype = dtype_of(argument);
      const at::Tensor& tensor = argument.tensor;
      if (!tensor.is_non_overlapping_and_dense())
        argument.refuse(tensor.strides(), "dense strides; make it contiguous");
      spans.push_back({tensor.const_data_ptr(), dtype, static_cast<std::size_t>(tensor.numel())});
      held.push_back(tensor);
    }
  }
};

UpdateStats gradient_stats_(Workers& workers, const py::list& tensors,
                            const std::optional<std::string>& level_name) {
  const GradCall call("gradient_stats", tensors);
  const CpuLevel level = level_from(level_name, "gradient_stats");
  py::gil_scoped_release release;
  return gradient_stats(call.spans.data(), call.spans.size(), workers, level);
}

py::int_ number(const ContentHash& hash) {
  return py::int_(hash.high) << py::int_(64) | py::int_(hash.low);
}

py::int_ content_hash_(Workers& workers, const py::list& tensors,
                       const std::optional<std::string>& level_name) {
  const GradCall call("content_hash", tensors);
  const CpuLevel level = level_from(level_name, "content_hash");
  ContentHash hash;
  {
    py::gil_scoped_release release;
    hash = content_hash(call.spans.data(), call.spans.size(), workers, level);
  }
  return number(hash);
}

void cast_(Workers& workers, py::handle dst, py::handle src,
           const std::optional<std::string>& level_name) {
  const Argument to = unpack("cast_", "dst", dst);
  const Argument from = unpack("cast_", "src", src);
  const DType to_dtype = dtype_of(to), from_dtype = dtype_of(from);
  require_same_layout(to, to);
  require_same_layout(from, to);
  require_disjoint("cast_", range_of(to), range_of(from));
  const CpuLevel level = level_from(level_name, "cast_");
  {
    py::gil_scoped_release release;
    cast(to.tensor.mutable_data_ptr(), to_dtype, from.tensor.const_data_ptr(), from_dtype,
         to.tensor.numel(), workers, level);
  }
  bump(to.tensor);
}

void copy_(Workers& workers, py::handle dst, py::handle src) {
  const Argument to = unpack("copy_", "dst", dst);
  const Argument from = unpack("copy_", "src", src);
  if (from.tensor.scalar_type() != to.tensor.scalar_type())
    from.refuse(from.tensor.scalar_type(), "dst's dtype (cast_ converts)");
  require_same_layout(to, to);
  require_same_layout(from, to);
  require_disjoint("copy_", range_of(to), range_of(from));
  {
    py::gil_scoped_release release;
    copy_bytes(to.tensor.mutable_data_ptr(), from.tensor.const_data_ptr(), to.tensor.nbytes(),
               workers);
  }
  bump(to.tensor);
}

void for_each_tile(Workers& workers, std::size_t num_tiles, const py::function& body) {
  py::gil_scoped_release release;
  workers.for_each_tile(num_tiles, [&](std::size_t tile) {
    const py::gil_scoped_acquire acquire;
    body(tile);
  });
}

py::dict cpu_features() {
  py::list supported;
  for (const CpuLevel level : supported_cpu_levels()) supported.append(cpu_level_name(level));
  py::dict features;
  features["level"] = cpu_level_name(cpu_level());
  features["supported"] = supported;
  features["affinity_cpus"] = affinity_cpus();
  features["cgroup_cpu_quota"] = cgroup_cpu_quota();
  features["default_num_workers"] = default_num_workers();
  return features;
}

}  // namespace

void bind_ops(py::module_& module) {
  py::class_<UpdateStats>(module, "UpdateStats", "By-products of one pass over gradients.")
      .def_readonly("grad_sq_norm", &UpdateStats::grad_sq_norm)
      .def_readonly("non_finite", &UpdateStats::non_finite)
      .def_property_readonly(
          "grad_hash", [](const UpdateStats& stats) { return number(stats.grad_hash); },
          "128 bits: content_hash() of the gradients in the order of the updates.")
      .def_readonly("edited", &UpdateStats::edited);
  py::class_<Workers, std::shared_ptr<Workers>>(module, "Workers", "The CPU worker threads.")
      .def(py::init<int>(), py::arg("num_workers"))
      .def_property_readonly("num_workers", &Workers::num_workers)
      .def("for_each_tile", &for_each_tile, py::arg("num_tiles"), py::arg("body"),
           "Call body(tile) once for each tile, from several threads, and raise its first error.");
  module.def("default_num_workers", &default_num_workers,
             "min(affinity, cgroup quota) / local ranks, at least 1.");
  module.def("cpu_features", &cpu_features, "The instruction set in use and the CPUs allowed.");
  module.def("cgroup_cpu_quota", &cgroup_cpu_quota, py::arg("root") = "");
  module.def("cpus_for_rank", &cpus_for_rank, py::arg("affinity"), py::arg("quota"),
             py::arg("local_world_size") = nullptr);
  module.def("squared_norm", &squared_norm_, py::arg("workers"), py::arg("values"),
             py::arg("level") = py::none(),
             "Sum of squares in double, and whether all are finite.");
  module.def("gradient_stats", &gradient_stats_, py::arg("workers"), py::arg("tensors"),
             py::arg("level") = py::none(),
             "What adamw_ would report of these gradients, in one pass.");
  module.def("content_hash", &content_hash_, py::arg("workers"), py::arg("tensors"),
             py::arg("level") = py::none(),
             "A 128-bit hash of the tensors' bytes and order, see csrc/kernels/content_hash.h.");
  module.def("cast_", &cast_, py::arg("workers"), py::arg("dst"), py::arg("src"),
             py::arg("level") = py::none(), "Convert src into dst, rounding to nearest even.");
  module.def("copy_", &copy_, py::arg("workers"), py::arg("dst"), py::arg("src"),
             "Copy src into dst over the workers.");
  module.def("release_file_pages", &release_file_pages, py::arg("ranges"),
             "Let the kernel have back the pages of (begin, end) address ranges that are mapped "
             "from files; they are read again when touched.");
}

}  // namespace autohete
