// Tensor operations of the kernels. Everything a caller can get wrong is checked here, once.
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
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

// The update's step number: a number, or a 0-dim tensor that will hold it.
double next_step(const char* where, py::handle step, std::vector<at::Tensor>& counters) {
  if (!THPVariable_Check(step.ptr())) return step.cast<double>();
  const Argument argument = unpack(where, "step", step);
  const at::Tensor& tensor = argument.tensor;
  if (tensor.numel() != 1) argument.refuse(tensor.sizes(), "one number");
  const auto dtype = tensor.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kLong)
    argument.refuse(dtype, "float32, float64 or int64");
  counters.push_back(tensor);
  const void* value = tensor.const_data_ptr();  // item() would go through the dispatcher
  if (dtype == at::kFloat) return *static_cast<const float*>(value) + 1.0;
  if (dtype == at::kDouble) return *static_cast<const double*>(value) + 1.0;
  return static_cast<double>(*static_cast<const std::int64_t*>(value)) + 1.0;
}

// From 2^24 on a float32 cannot count any further; the same tensor goes on in float64.
void count(at::Tensor& counter) {
  if (counter.scalar_type() == at::kFloat) {
    float* value = counter.mutable_data_ptr<float>();
    if (*value < 16777216.0f) {
      *value += 1;
      return bump(counter);
    }
    counter.set_data(counter.to(at::kDouble));
  }
  if (counter.scalar_type() == at::kLong) {
    *counter.mutable_data_ptr<std::int64_t>() += 1;
  } else {
    *counter.mutable_data_ptr<double>() += 1;
  }
  bump(counter);
}

// One call's spans, with what has to happen when they are done.
struct AdamCall {
  static constexpr const char* kWhere = "adamw_";
  std::vector<AdamSpan> spans;
  std::vector<at::Tensor> written;
  std::vector<at::Tensor> counters;
  std::vector<Range> params;

  // Where the new value of state tensor `i` goes, None for in place.
  static py::object destination(const py::handle& out, std::size_t i) {
    if (out.is_none()) return py::none();
    const auto tensors = out.cast<py::tuple>();
    return i < tensors.size() ? py::object(tensors[i]) : py::none();
  }

  // `update` is (hyper, step, grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq, half).
  void add(const py::tuple& update, const py::handle& out) {
    require(update.size() == 8, kWhere, ": an update has ", update.size(), " items, expected 8");
    AdamSpan span;
    span.hyper = update[0].cast<const AdamHyper&>();
    span.step = next_step(kWhere, update[1], counters);
    const Argument grad = unpack(kWhere, "grad", update[2]);
    const Argument param = unpack(kWhere, "param", update[3]);
    span.numel = param.tensor.numel();
    span.grad_dtype = dtype_of(grad);
    span.grad = grad.tensor.const_data_ptr();
    require_same_layout(param, param);
    std::vector<Range> ranges = {range_of(grad)};
    require_same_layout(grad, param);

    std::array<Argument, 4> state = {param, unpack(kWhere, "exp_avg", update[4]),
                                     unpack(kWhere, "exp_avg_sq", update[5]), Argument{}};
    const std::size_t num_state = span.hyper.amsgrad ? 4 : 3;
    if (span.hyper.amsgrad) state[3] = unpack(kWhere, "max_exp_avg_sq", update[6]);
    const std::array in = {&span.param_in, &span.exp_avg_in, &span.exp_avg_sq_in,
                           &span.max_exp_avg_sq_in};
    const std::array outs = {&span.param_out, &span.exp_avg_out, &span.exp_avg_sq_out,
                             &span.max_exp_avg_sq_out};
    for (std::size_t i = 0; i < num_state; ++i) {
      *in[i] = fp32(state[i]);
      require_same_layout(state[i], param);
      ranges.push_back(range_of(state[i]));
      Argument to = state[i];
      if (const py::object given = destination(out, i); !given.is_none()) {
        to = unpack(kWhere, state[i].name, given);
        require_same_layout(to, param);
        ranges.push_back(range_of(to));
      }
      *outs[i] = mutable_fp32(to);
      if (i == 0) params.push_back(range_of(to));
      written.push_back(to.tensor);
    }
    if (!update[7].is_none()) {
      const Argument half = unpack(kWhere, "half", update[7]);
      span.half_dtype = dtype_of(half);
      if (span.half_dtype == DType::kFloat32) half.refuse("float32", "bfloat16 or float16");
      require_same_layout(half, param);
      span.half_in = half.tensor.const_data_ptr();
      ranges.push_back(range_of(half));
      Argument to = half;
      if (const py::object given = destination(out, 4); !given.is_none()) {
        to = unpack(kWhere, half.name, given);
        require_same_layout(to, param);
        if (dtype_of(to) != span.half_dtype) to.refuse(to.tensor.scalar_type(), "half's own dtype");
        ranges.push_back(range_of(to));
      }
      span.half_out = to.tensor.mutable_data_ptr();
      written.push_back(to.tensor);
    }
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) require_disjoint(kWhere, ranges[i], ranges[j]);
    }
    spans.push_back(span);
  }

  void require_params_disjoint() {
    std::sort(params.begin(), params.end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < params.size(); ++i) {
      require(params[i - 1].end <= params[i].begin || params[i].begin == params[i].end, kWhere,
              ": param overlaps the param of another update, expected separate memory");
    }
  }
};

CpuLevel level_from(const std::optional<std::string>& name, const char* where) {
  return name ? parse_cpu_level(*name, where) : cpu_level();
}

UpdateStats adamw_(Workers& workers, const py::list& updates, const py::object& out,
                   const std::optional<std::string>& level_name, bool by_products) {
  AdamCall call;
  call.spans.reserve(updates.size());
  const CpuLevel level = level_from(level_name, AdamCall::kWhere);
  if (!out.is_none()) {
    require(py::len(out) == updates.size(), AdamCall::kWhere, ": out has ", py::len(out),
            " items, expected one for each of the ", updates.size(), " updates");
  }
  for (std::size_t i = 0; i < updates.size(); ++i) {
    call.add(updates[i].cast<py::tuple>(),
             out.is_none() ? py::object(py::none()) : out.cast<py::list>()[i].cast<py::object>());
  }
  call.require_params_disjoint();
  UpdateStats stats;
  {
    py::gil_scoped_release release;
    stats = adamw(call.spans.data(), call.spans.size(), workers, level, by_products);
  }
  for (at::Tensor& counter : call.counters) count(counter);
  for (const at::Tensor& tensor : call.written) bump(tensor);
  return stats;
}

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

void bind_hyper(py::module_& module) {
  const auto make = [](double lr, double beta1, double beta2, double eps, double weight_decay,
                       bool decoupled_decay, bool maximize, bool amsgrad, double grad_scale) {
    return AdamHyper{lr,       beta1,   beta2,     eps, weight_decay, decoupled_decay,
                     maximize, amsgrad, grad_scale};
  };
  py::class_<AdamHyper>(module, "AdamHyper", "What one update of Adam or AdamW is made with.")
      .def(py::init(make), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled_decay") = true,
           py::arg("maximize") = false, py::arg("amsgrad") = false, py::arg("grad_scale") = 1.0)
      .def_readonly("lr", &AdamHyper::lr)
      .def_readonly("beta1", &AdamHyper::beta1)
      .def_readonly("beta2", &AdamHyper::beta2)
      .def_readonly("eps", &AdamHyper::eps)
      .def_readonly("weight_decay", &AdamHyper::weight_decay)
      .def_readonly("decoupled_decay", &AdamHyper::decoupled_decay)
      .def_readonly("maximize", &AdamHyper::maximize)
      .def_readonly("amsgrad", &AdamHyper::amsgrad)
      .def_readonly("grad_scale", &AdamHyper::grad_scale);
}

}  // namespace

void bind_ops(py::module_& module) {
  bind_hyper(module);
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
  module.def(
      "adamw_", &adamw_, py::arg("workers"), py::arg("updates"), py::arg("out") = py::none(),
      py::arg("level") = py::none(), py::arg("by_products") = true,
      "Apply updates, each (hyper, step, grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq or "
      "None, half or None). A step that is a tensor counts up and holds the new number. "
      "With out, a list of (param, exp_avg, exp_avg_sq[, max_exp_avg_sq[, half]]), new values "
      "go there and the old ones stay; None is in place. Without by_products only `edited` is "
      "filled in.");
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
