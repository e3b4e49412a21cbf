// An optimizer's updates, read once and made again step after step.
//
// With many small tensors most of a step goes into reading Python objects. From one step to the
// next only gradients, hyper-parameters and counters usually change. What else may have changed
// behind our back (a parameter's memory, an entry of the state, a layout) is looked at without
// hashing or allocating; where anything did, the answer is "no" and nothing has been written.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <utility>
#include <vector>

#include "csrc/bindings/span_reader.h"
#include "csrc/kernels/kernels.h"
#include "csrc/runtime/workers.h"

namespace autohete {

// A dict's keys and values in their order, and whether they are still the same objects.
class DictLook {
 public:
  explicit DictLook(py::handle dict) : dict_(py::reinterpret_borrow<py::object>(dict)) {
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(dict)) {
      items_.emplace_back(py::reinterpret_borrow<py::object>(key),
                          py::reinterpret_borrow<py::object>(value));
    }
  }

  bool same() const {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t at = 0;
    std::size_t seen = 0;
    while (PyDict_Next(dict_.ptr(), &at, &key, &value) != 0) {
      if (seen == items_.size() || items_[seen].first.ptr() != key ||
          items_[seen].second.ptr() != value)
        return false;
      ++seen;
    }
    return seen == items_.size();
  }

  const py::object& dict() const { return dict_; }
  const std::vector<std::pair<py::object, py::object>>& items() const { return items_; }

 private:
  py::object dict_;
  std::vector<std::pair<py::object, py::object>> items_;
};

// Memory that the update reads and writes besides the gradient: parameter, state, half copy.
struct KeptTensor {
  py::object object;
  void* memory;
  at::ScalarType dtype;

  explicit KeptTensor(py::object of)
      : object(std::move(of)), memory(tensor().mutable_data_ptr()), dtype(tensor().scalar_type()) {}

  const at::Tensor& tensor() const { return THPVariable_Unpack(object.ptr()); }

  bool same(at::IntArrayRef sizes) const {
    const at::Tensor& now = tensor();
    return now.mutable_data_ptr() == memory && now.scalar_type() == dtype && now.is_contiguous() &&
           !now.is_neg() && now.sizes() == sizes;
  }
};

template <typename Span>
class KeptUpdates {
 public:
  using Update = UpdateStats (*)(const Span*, std::size_t, Workers&, CpuLevel, bool,
                                 const std::function<void()>&);

  // `params`: the parameters of all groups in their order; `groups`: each one's group; `updates`:
  // each one's update as adamw_() and its like take it, or None without a gradient; `state`: the
  // optimizer's. Reads and checks everything, and throws as they do. Only contiguous tensors can
  // be kept.
  KeptUpdates(const char* where, Update update, const py::list& params, std::vector<int> groups,
              const py::list& updates, const py::dict& state)
      : where_(where), update_(update), groups_(std::move(groups)), state_(state) {
    for (const auto& [param, values] : state_.items()) states_.emplace_back(values);
    CallTensors call = {where};
    for (std::size_t i = 0; i < params.size(); ++i) {
      const py::object param = params[i];
      Kept& kept = kept_.emplace_back(Kept{param, Py_TYPE(param.ptr())});
      if (updates[i].is_none()) continue;
      read_one(call, kept, updates[i].cast<py::tuple>());
    }
    call.require_updates_disjoint();
  }

  // Makes all updates with the gradients that the parameters have now and one hyper for each
  // group. False: something is not as it was; nothing has been written.
  bool run(Workers& workers, const py::list& params, const py::list& hypers,
           const py::object& state) {
    if (!state.is(state_.dict()) || !same(params) || !take_gradients(params) ||
        !take_numbers(hypers))
      return false;
    {
      py::gil_scoped_release release;
      update_(spans_.data(), spans_.size(), workers, cpu_level(), false, [&] { note_written(); });
    }
    return true;
  }

  // For Python's garbage collector: everything held that may lie on a cycle.
  template <typename Visit>
  int visit(const Visit& visit_one) const {
    const auto dict = [&](const DictLook& look) {
      if (int stop = visit_one(look.dict()); stop != 0) return stop;
      for (const auto& [key, value] : look.items()) {
        if (int stop = visit_one(key); stop != 0) return stop;
        if (int stop = visit_one(value); stop != 0) return stop;
      }
      return 0;
    };
    if (int stop = dict(state_); stop != 0) return stop;
    for (const DictLook& values : states_) {
      if (int stop = dict(values); stop != 0) return stop;
    }
    for (const Kept& kept : kept_) {
      if (int stop = visit_one(kept.param); stop != 0) return stop;
      if (int stop = visit_one(kept.step); stop != 0) return stop;
      for (const KeptTensor& tensor : kept.tensors) {
        if (int stop = visit_one(tensor.object); stop != 0) return stop;
      }
    }
    return 0;
  }

 private:
  static constexpr std::size_t kStep = 1, kGrad = 2, kParam = 3;  // places in an update

  struct Kept {
    py::object param;
    PyTypeObject* type;  // one that moves wears another class
    py::object step{};
    const at::Tensor* counter = nullptr;  // the step where that is a tensor
    std::vector<KeptTensor> tensors{};    // none: without an update; else the parameter first
  };

  // Counts the steps and tells autograd. Without the GIL, while workers update: references are
  // neither taken nor given up here, and Python is asked nothing.
  void note_written() const {
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      for (const KeptTensor& tensor : kept_[i].tensors) bump(tensor.tensor());
      if (kept_[i].counter != nullptr) count_on(*kept_[i].counter);
    }
  }

  void read_one(CallTensors& call, Kept& kept, const py::tuple& update) {
    Span& span = spans_.emplace_back();
    read(call, update, py::none(), span);
    kept.step = update[kStep];
    if (THPVariable_Check(kept.step.ptr())) kept.counter = &THPVariable_Unpack(kept.step.ptr());
    for (std::size_t place = kParam; place < update.size(); ++place) {
      if (!THPVariable_Check(update[place].ptr())) continue;
      kept.tensors.emplace_back(py::object(update[place]));
    }
  }

  bool same(const py::list& params) const {
    if (params.size() != kept_.size() || !state_.same()) return false;
    for (const DictLook& values : states_) {
      if (!values.same()) return false;
    }
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const Kept& kept = kept_[i];
      PyObject* param = PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i));
      if (param != kept.param.ptr() || Py_TYPE(param) != kept.type) return false;
      for (const KeptTensor& tensor : kept.tensors) {
        if (!tensor.same(kept.tensors[0].tensor().sizes())) return false;
      }
    }
    return true;
  }

  bool take_gradients(const py::list& params) {
    std::size_t at = 0;
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const py::object grad = py::getattr(params[i], grad_name_);
      if (grad.is_none() != kept_[i].tensors.empty()) return false;
      if (!grad.is_none() && !take_gradient(grad, kept_[i], spans_[at++])) return false;
    }
    return true;
  }

  bool take_gradient(const py::object& object, const Kept& kept, Span& span) const {
    if (!THPVariable_CheckExact(object.ptr())) return false;
    const at::Tensor& grad = THPVariable_Unpack(object.ptr());
    const at::Tensor& param = kept.tensors[0].tensor();
    if (!grad.device().is_cpu() || grad.layout() != at::kStrided || !grad.is_contiguous() ||
        grad.is_neg() || grad.unsafeGetTensorImpl()->is_python_dispatch() ||
        grad.sizes() != param.sizes() || static_cast<std::size_t>(param.numel()) != span.numel)
      return false;
    const auto dtype = grad.scalar_type();
    if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return false;
    const Argument argument = {where_, "grad", grad};
    const Range range = range_of(argument);
    for (const KeptTensor& tensor : kept.tensors) {
      const auto* begin = static_cast<const char*>(tensor.memory);
      if (range.begin < begin + param.numel() * c10::elementSize(tensor.dtype) && begin < range.end)
        return false;
    }
    span.grad = range.begin;
    span.grad_dtype = dtype_of(argument);
    return true;
  }

  bool take_numbers(const py::list& hypers) {
    std::vector<decltype(Span::hyper)> values;
    for (const auto& hyper : hypers) values.push_back(hyper.template cast<decltype(Span::hyper)>());
    std::size_t at = 0;
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      if (kept_[i].tensors.empty()) continue;
      Span& span = spans_[at++];
      const auto& hyper = values.at(groups_.at(i));
      if (!same_tensors(span.hyper, hyper)) return false;
      span.hyper = hyper;
      if (!take_step(kept_[i], span)) return false;
    }
    return true;
  }

  // What decides which tensors an update needs.
  static bool same_tensors(const AdamHyper& a, const AdamHyper& b) {
    return a.amsgrad == b.amsgrad;
  }
  static bool same_tensors(const LionHyper&, const LionHyper&) { return true; }
  static bool same_tensors(const SgdHyper& a, const SgdHyper& b) {
    return (a.momentum != 0) == (b.momentum != 0);
  }

  // A counter that is not what it was, or cannot count on, is the affair of who reads anew.
  bool take_step(const Kept& kept, AdamSpan& span) const {
    if (kept.counter == nullptr) {
      span.step = kept.step.template cast<double>();
      return true;
    }
    const at::Tensor& step = *kept.counter;
    const auto dtype = step.scalar_type();
    const bool is_one = step.is_cpu() && step.layout() == at::kStrided && step.numel() == 1 &&
                        !step.unsafeGetTensorImpl()->is_python_dispatch() &&
                        (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kLong);
    if (!is_one || !counts_as_it_is(step)) return false;
    span.step = count_of(step) + 1.0;
    return true;
  }
  bool take_step(const Kept&, LionSpan&) const { return true; }
  bool take_step(const Kept&, SgdSpan& span) const {
    return span.hyper.momentum == 0 || !span.first;
  }

  const char* const where_;
  const Update update_;
  const std::vector<int> groups_;
  const DictLook state_;
  std::vector<DictLook> states_;
  std::vector<Kept> kept_;
  std::vector<Span> spans_;
  const py::str grad_name_{"grad"};
};

}  // namespace autohete
