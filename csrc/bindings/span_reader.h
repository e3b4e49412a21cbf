// The updates of one call, read from Python. Everything a caller can get wrong is checked here,
// once.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/bindings/tensor_argument.h"
#include "csrc/kernels/kernels.h"

namespace autohete {

// What a counter stands at; item() would go through the dispatcher.
inline double count_of(const at::Tensor& counter) {
  const void* value = counter.const_data_ptr();
  if (counter.scalar_type() == at::kFloat) return *static_cast<const float*>(value);
  if (counter.scalar_type() == at::kDouble) return *static_cast<const double*>(value);
  return static_cast<double>(*static_cast<const std::int64_t*>(value));
}

// From 2^24 on a float32 cannot count any further.
inline bool counts_as_it_is(const at::Tensor& counter) {
  return counter.scalar_type() != at::kFloat || count_of(counter) < 16777216.0;
}

// Of a counter that counts as it is. Needs no GIL.
inline void count_on(const at::Tensor& counter) {
  if (counter.scalar_type() == at::kFloat) {
    *counter.mutable_data_ptr<float>() += 1;
  } else if (counter.scalar_type() == at::kLong) {
    *counter.mutable_data_ptr<std::int64_t>() += 1;
  } else {
    *counter.mutable_data_ptr<double>() += 1;
  }
  bump(counter);
}

// The same tensor goes on in float64 where it must.
inline void count(at::Tensor& counter) {
  if (!counts_as_it_is(counter)) counter.set_data(counter.to(at::kDouble));
  count_on(counter);
}

// The update's step number: a number, or a 0-dim tensor that will hold it.
inline double next_step(const char* where, py::handle step, std::vector<at::Tensor>& counters) {
  if (!THPVariable_Check(step.ptr())) return value_of<double>(where, "step", step, "a number");
  const Argument argument = unpack(where, "step", step);
  const at::Tensor& tensor = argument.tensor;
  if (tensor.numel() != 1) argument.refuse(tensor.sizes(), "one number");
  const auto dtype = tensor.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kLong)
    argument.refuse(dtype, "float32, float64 or int64");
  counters.push_back(tensor);
  return count_of(tensor) + 1.0;
}

// What one call has to remember besides its spans.
struct CallTensors {
  const char* where;
  std::vector<at::Tensor> written{};
  std::vector<at::Tensor> counters{};
  std::vector<Range> reads{};   // gradients, and old values that stay
  std::vector<Range> writes{};  // new values

  // Updates are made side by side, so that none may write what another reads or writes. (Two may
  // read the same gradient.) Within one update SpanReader has looked.
  void require_updates_disjoint() {
    const auto is_empty = [](const Range& range) { return range.begin == range.end; };
    std::erase_if(writes, is_empty);
    std::erase_if(reads, is_empty);
    std::sort(writes.begin(), writes.end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < writes.size(); ++i) {
      if (writes[i - 1].end > writes[i].begin) refuse_overlap(writes[i - 1], writes[i]);
    }
    for (const Range& read : reads) {
      const auto behind =
          std::upper_bound(writes.begin(), writes.end(), read.begin,
                           [](const char* begin, const Range& range) { return begin < range.end; });
      if (behind != writes.end() && behind->begin < read.end) refuse_overlap(read, *behind);
    }
  }

  [[noreturn]] void refuse_overlap(const Range& a, const Range& b) const {
    throw std::invalid_argument(concat(where, ": ", a.name, " overlaps the ", b.name,
                                       " of another update, expected separate memory"));
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
    call_.reads.push_back(ranges_.back());
    require_same_layout(param_, param_);
    require_same_layout(grad, param_);
    span_.param_in = fp32(param_);
    span_.param_out = mutable_fp32(destination(param_));
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
      using Pair = std::pair<std::uint64_t, std::uint64_t>;
      std::tie(span_.seed, span_.offset) =
          value_of<Pair>(call_.where, "random", random, "(seed, offset), both from 0 to 2^64 - 1");
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
        call_.reads.push_back(ranges_.back());
        ranges_.push_back(range_of(to));
      }
    }
    call_.writes.push_back(ranges_.back());
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

inline py::object item_or_none(const py::tuple& update, std::size_t i) {
  return i < update.size() ? py::object(update[i]) : py::none();
}

// (hyper, step, grad, param, exp_avg, exp_avg_sq, max_exp_avg_sq, half[, random])
inline void read(CallTensors& call, const py::tuple& update, py::handle out, AdamSpan& span) {
  require(update.size() == 8 || update.size() == 9, call.where, ": an update has ", update.size(),
          " items, expected 8 or 9");
  SpanReader reader(call, span, out);
  span.hyper = value_of<AdamHyper>(call.where, "hyper", update[0], "an AdamHyper");
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
inline void read(CallTensors& call, const py::tuple& update, py::handle out, SgdSpan& span) {
  require(update.size() == 6 || update.size() == 7, call.where, ": an update has ", update.size(),
          " items, expected 6 or 7");
  SpanReader reader(call, span, out);
  span.hyper = value_of<SgdHyper>(call.where, "hyper", update[0], "an SgdHyper");
  span.first = value_of<bool>(call.where, "first", update[1], "True or False");
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
inline void read(CallTensors& call, const py::tuple& update, py::handle out, LionSpan& span) {
  require(update.size() == 6 || update.size() == 7, call.where, ": an update has ", update.size(),
          " items, expected 6 or 7");
  SpanReader reader(call, span, out);
  span.hyper = value_of<LionHyper>(call.where, "hyper", update[0], "a LionHyper");
  span.step = next_step(call.where, update[1], call.counters);
  reader.read_grad_and_param(update[2], update[3]);
  reader.read_state("exp_avg", update[4], span.exp_avg_in, span.exp_avg_out);
  reader.read_half(update[5]);
  reader.read_random(item_or_none(update, 6));
  reader.finish();
}

}  // namespace autohete
