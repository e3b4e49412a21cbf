// Updates of tensors by the kernels. Everything a caller can get wrong is checked here, once.
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/bindings/tensor_argument.h"
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

// What one call has to remember besides its spans.
struct CallTensors {
  const char* where;
  std::vector<at::Tensor> written{};
  std::vector<at::Tensor> counters{};
  std::vector<Range> params{};

  void require_params_disjoint() {
    std::sort(params.begin(), params.end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < params.size(); ++i) {
      require(params[i - 1].end <= params[i].begin || params[i].begin == params[i].end, where,
              ": param overlaps the param of another update, expected separate memory");
    }
  }

  void finish() {
    for (at::Tensor& counter : counters) count(counter);
    for (const at::Tensor& tensor : written) bump(tensor);
  }
};

// Fills in one span from its tensors. `out` is None or a tuple: where the new values of the
// parameter, the states and the half copy go, None for in place.
class SpanReader {
 public:
  SpanReader(CallTensors& call, UpdateSpan& span, py::handle out)
      : call_(call), span_(span), out_(out) {}

  void read_grad_and_param(py::handle grad_object, py::handle param_object) {
    const Argument grad = unpack(call_.where, "grad", grad_object);
    param_ = unpack(call_.where, "param", param_object);
    span_.numel = param_.tensor.numel();
    span_.grad_dtype = dtype_of(grad);
    span_.grad = grad.tensor.const_data_ptr();
    ranges_.push_back(range_of(grad));
    require_same_layout(param_, param_);
    require_same_layout(grad, param_);
    span_.param_in = fp32(param_);
    const Argument to = destination(param_);
    span_.param_out = mutable_fp32(to);
    call_.params.push_back(range_of(to));
  }

  void read_state(const char* name, py::handle object, const void*& in, void*& out) {
    const Argument state = unpack(call_.where, name, object);
    require_same_layout(state, param_);
    const DType dtype = dtype_of(state);
    if (dtype == DType::kFloat16) state.refuse("float16", "float32 or bfloat16");
    if (states_++ == 0) span_.state_dtype = dtype;
    if (dtype != span_.state_dtype) {
      state.refuse(state.tensor.scalar_type(), span_.state_dtype == DType::kFloat32
                                                   ? "float32, as the first state is"
                                                   : "bfloat16, as the first state is");
    }
    in = state.tensor.const_data_ptr();
    out = destination(state).tensor.mutable_data_ptr();
  }

  // A state that this update does without still has its place in `out`.
  void skip_state() { ++place_; }

  void read_half(py::handle object) {
    if (object.is_none()) return;
    const Argument half = unpack(call_.where, "half", object);
    span_.half_dtype = dtype_of(half);
    if (span_.half_dtype == DType::kFloat32) half.refuse("float32", "bfloat16 or float16");
    require_same_layout(half, param_);
    span_.half_in = half.tensor.const_data_ptr();
    span_.half_out = destination(half).tensor.mutable_data_ptr();
  }

  // `random` is (seed, items of the tensor before this one); bf16 states need it.
  void read_random(py::handle random) {
    if (!random.is_none()) {
      std::tie(span_.seed, span_.offset) = random.cast<std::pair<std::uint64_t, std::uint64_t>>();
    }
    require(!random.is_none() || states_ == 0 || span_.state_dtype == DType::kFloat32, call_.where,
            ": random is None with bfloat16 states, expected (seed, offset)");
  }

  void finish() const {
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) require_disjoint(call_.where, ranges_[i], ranges_[j]);
    }
  }

 private:
  // Where the new value of `old` goes: the next place of `out`, or where the old one is.
  Argument destination(const Argument& old) {
    ranges_.push_back(range_of(old));
    const std::size_t place = place_++;
    Argument to = old;
    if (!out_.is_none()) {
      const auto tensors = py::reinterpret_borrow<py::tuple>(out_);
      if (place < tensors.size() && !tensors[place].is_none()) {
        to = unpack(call_.where, old.name, tensors[place]);
        require_same_layout(to, param_);
        if (to.tensor.scalar_type() != old.tensor.scalar_type())
          to.refuse(to.tensor.scalar_type(), "the dtype of the old values");
        ranges_.push_back(range_of(to));
      }
    }
    call_.written.push_back(to.tensor);
    return to;
  }

  CallTensors& call_;
  UpdateSpan& span_;
  const py::handle out_;
  Argument param_{};
  std::vector<Range> ranges_{};
  std::size_t place_ = 0, states_ = 0;
};

py::object item_or_none(const py::tuple& update, std::size_t i) {
  return i < update.size() ? py::object(update[i]) : py::none();
}

// (hyper, step, grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq, half[, random])
void read(CallTensors& call, const py::tuple& update, py::handle out, AdamSpan& span) {
  require(update.size() == 8 || update.size() == 9, call.where, ": an update has ", update.size(),
          " items, expected 8 or 9");
  SpanReader reader(call, span, out);
  span.hyper = update[0].cast<const AdamHyper&>();
  span.step = next_step(call.where, update[1], call.counters);
  reader.read_grad_and_param(update[2], update[3]);
  reader.read_state("exp_avg", update[4], span.exp_avg_in, span.exp_avg_out);
  reader.read_state("exp_avg_sq", update[5], span.exp_avg_sq_in, span.exp_avg_sq_out);
  if (span.hyper.amsgrad) {
    reader.read_state("max_exp_avg_sq", update[6], span.max_exp_avg_sq_in, span.max_exp_avg_sq_out);
  } else {
    reader.skip_state();
  }
  reader.read_half(update[7]);
  reader.read_random(item_or_none(update, 8));
  reader.finish();
}

// (hyper, first, grad, param, momentum_buffer or None, half[, random])
void read(CallTensors& call, const py::tuple& update, py::handle out, SgdSpan& span) {
  require(update.size() == 6 || update.size() == 7, call.where, ": an update has ", update.size(),
          " items, expected 6 or 7");
  SpanReader reader(call, span, out);
  span.hyper = update[0].cast<const SgdHyper&>();
  span.first = update[1].cast<bool>();
  reader.read_grad_and_param(update[2], update[3]);
  if (span.hyper.momentum != 0) {
    reader.read_state("momentum_buffer", update[4], span.momentum_in, span.momentum_out);
  } else {
    reader.skip_state();
  }
  reader.read_half(update[5]);
  reader.read_random(item_or_none(update, 6));
  reader.finish();
}

// (hyper, step, grad, param, exp_avg, half[, random])
void read(CallTensors& call, const py::tuple& update, py::handle out, LionSpan& span) {
  require(update.size() == 6 || update.size() == 7, call.where, ": an update has ", update.size(),
          " items, expected 6 or 7");
  SpanReader reader(call, span, out);
  span.hyper = update[0].cast<const LionHyper&>();
  span.step = next_step(call.where, update[1], call.counters);
  reader.read_grad_and_param(update[2], update[3]);
  reader.read_state("exp_avg", update[4], span.exp_avg_in, span.exp_avg_out);
  reader.read_half(update[5]);
  reader.read_random(item_or_none(update, 6));
  reader.finish();
}

template <typename Span, typename Update>
UpdateStats run(const char* where, Update update, Workers& workers, const py::list& updates,
                const py::object& out, const std::optional<std::string>& level_name,
                bool by_products) {
  CallTensors call = {where};
  std::vector<Span> spans(updates.size());
  const CpuLevel level = level_from(level_name, where);
  if (!out.is_none()) {
    require(py::len(out) == updates.size(), where, ": out has ", py::len(out),
            " items, expected one for each of the ", updates.size(), " updates");
  }
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const py::object there =
        out.is_none() ? py::object(py::none()) : out[py::int_(i)].cast<py::object>();
    read(call, updates[i].cast<py::tuple>(),
         there.is_none() ? there : py::object(there.cast<py::tuple>()), spans[i]);
  }
  call.require_params_disjoint();
  UpdateStats stats;
  {
    py::gil_scoped_release release;
    stats = update(spans.data(), spans.size(), workers, level, by_products);
  }
  call.finish();
  return stats;
}

UpdateStats adamw_(Workers& workers, const py::list& updates, const py::object& out,
                   const std::optional<std::string>& level, bool by_products) {
  return run<AdamSpan>("adamw_", adamw, workers, updates, out, level, by_products);
}

UpdateStats sgd_(Workers& workers, const py::list& updates, const py::object& out,
                 const std::optional<std::string>& level, bool by_products) {
  return run<SgdSpan>("sgd_", sgd, workers, updates, out, level, by_products);
}

UpdateStats lion_(Workers& workers, const py::list& updates, const py::object& out,
                  const std::optional<std::string>& level, bool by_products) {
  return run<LionSpan>("lion_", lion, workers, updates, out, level, by_products);
}

void bind_adam_hyper(py::module_& module) {
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

void bind_other_hypers(py::module_& module) {
  const auto make_sgd = [](double lr, double momentum, double dampening, double weight_decay,
                           bool nesterov, bool maximize, double grad_scale) {
    return SgdHyper{lr, momentum, dampening, weight_decay, nesterov, maximize, grad_scale};
  };
  py::class_<SgdHyper>(module, "SgdHyper", "What one update of SGD is made with.")
      .def(py::init(make_sgd), py::kw_only(), py::arg("lr"), py::arg("momentum") = 0.0,
           py::arg("dampening") = 0.0, py::arg("weight_decay") = 0.0, py::arg("nesterov") = false,
           py::arg("maximize") = false, py::arg("grad_scale") = 1.0);
  const auto make_lion = [](double lr, double beta1, double beta2, double weight_decay,
                            bool maximize, double grad_scale) {
    return LionHyper{lr, beta1, beta2, weight_decay, maximize, grad_scale};
  };
  py::class_<LionHyper>(module, "LionHyper", "What one update of Lion is made with.")
      .def(py::init(make_lion), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("weight_decay") = 0.0, py::arg("maximize") = false, py::arg("grad_scale") = 1.0);
}

}  // namespace

void bind_updates(py::module_& module) {
  bind_adam_hyper(module);
  bind_other_hypers(module);
  const auto def = [&](const char* name, auto* function, const char* text) {
    module.def(name, function, py::arg("workers"), py::arg("updates"), py::arg("out") = py::none(),
               py::arg("level") = py::none(), py::arg("by_products") = true, text);
  };
  def("adamw_", &adamw_,
      "Apply updates, each (hyper, step, grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq or "
      "None, half or None[, random]). A step that is a tensor counts up and holds the new number. "
      "With out, a list of (param, exp_avg, exp_avg_sq[, max_exp_avg_sq[, half]]), new values "
      "go there and the old ones stay; None is in place. random is (seed, offset), needed for "
      "bfloat16 moments. Without by_products only `edited` is filled in.");
  def("sgd_", &sgd_,
      "Apply updates, each (hyper, first, grad, param, momentum_buffer or None, half or None[, "
      "random]), as adamw_ does; `first` says that the buffer holds nothing yet.");
  def("lion_", &lion_,
      "Apply updates, each (hyper, step, grad, param, exp_avg, half or None[, random]), as adamw_ "
      "does.");
}

}  // namespace autohete
