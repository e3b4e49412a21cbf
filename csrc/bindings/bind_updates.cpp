// Updates of tensors by the kernels, as Python calls them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/bindings/kept_updates.h"
#include "csrc/bindings/span_reader.h"
#include "csrc/kernels/kernels.h"
#include "csrc/runtime/workers.h"

namespace autohete {
namespace {

py::tuple tuple_of(const char* where, const char* name, const py::object& item) {
  if (py::isinstance<py::tuple>(item) || py::isinstance<py::list>(item)) return item;
  throw std::invalid_argument(concat(where, ": ", name, " holds ",
                                     py::repr(item).cast<std::string>(), ", expected tuples"));
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
    read(call, tuple_of(where, "updates", updates[i]),
         there.is_none() ? there : tuple_of(where, "out", there), spans[i]);
  }
  call.require_updates_disjoint();
  UpdateStats stats;
  {
    py::gil_scoped_release release;
    stats = update(spans.data(), spans.size(), workers, level, by_products, nullptr);
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

// The updates of one optimizer under a name of their own. Python's collector sees through it: a
// parameter's hook may hold the optimizer.
template <typename Span>
void bind_kept(py::module_& module, const char* name, const char* where,
               typename KeptUpdates<Span>::Update update) {
  using Kept = KeptUpdates<Span>;
  const auto collected = py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject* type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (!py::detail::is_holder_constructed(self)) return 0;
      return py::cast<Kept*>(py::handle(self))->visit([&](const py::object& object) {
        return object ? visit(object.ptr(), arg) : 0;
      });
    };
  });
  py::class_<Kept>(module, name, collected, "An optimizer's updates, read once.")
      .def(py::init([where, update](const py::list& params, std::vector<int> groups,
                                    const py::list& updates, const py::dict& state) {
             return new Kept(where, update, params, std::move(groups), updates, state);
           }),
           py::arg("params"), py::arg("groups"), py::arg("updates"), py::arg("state"))
      .def("run", &Kept::run, py::arg("workers"), py::arg("params"), py::arg("hypers"),
           py::arg("state"),
           "Make them with the present gradients and one hyper a group. False: something is not as "
           "it was, and nothing has been written.");
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
  bind_kept<AdamSpan>(module, "KeptAdamW", "adamw_", adamw);
  bind_kept<SgdSpan>(module, "KeptSgd", "sgd_", sgd);
  bind_kept<LionSpan>(module, "KeptLion", "lion_", lion);
}

}  // namespace autohete
