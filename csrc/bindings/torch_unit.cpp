// Over 350 lines: where a unit's tensors live and how they change sides is one story.
#include "csrc/bindings/torch_unit.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "csrc/base/check.h"

namespace autohete {
namespace {

// exp_avg, exp_avg_sq, max_exp_avg_sq, master: the arrays of one parameter's state, in this order.
enum StateArray { kExpAvg = 0, kExpAvgSq = 1, kMaxExpAvgSq = 2, kMaster = 3 };

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      throw std::invalid_argument(concat("autohete: parameter dtype is ", c10::toString(type),
                                         ", expected float32, bfloat16 or float16"));
  }
}

// The gradient as one contiguous range in the parameter's own layout. One that stands in a block is
// another parameter's (p.grad = q.grad): its bytes may be overwritten there before they are read.
at::Tensor exclusive_gradient(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (owns_its_storage(gradient) && gradient.strides() == parameter.strides() &&
      !stands_in_a_block(gradient.storage()))
    return gradient;
  at::Tensor copy = at::empty_strided(parameter.sizes(), parameter.strides(), gradient.options());
  copy.copy_(gradient.detach());
  parameter.mutable_grad() = copy;
  return copy;
}

}  // namespace

TorchUnit::TorchUnit(std::string name, const std::vector<at::Tensor>& parameters,
                     const std::vector<at::Tensor>& masters, const std::vector<bool>& updated,
                     bool with_state, bool amsgrad, const UnitPlan& plan, Store& store,
                     c10::Device device, const CopyAndWait& copy, RankOf rank)
    : name_(std::move(name)), device_(device), amsgrad_(amsgrad) {
  AH_ASSERT(parameters.size() == masters.size() && parameters.size() == updated.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TorchParameter parameter;
    parameter.value = HomedTensor(parameters[i], param_bytes_);
    cut(parameter, rank);
    const std::size_t bytes = align_up(parameters[i].nbytes());
    param_bytes_ += bytes;
    if (updated[i]) {
      parameter.has_room = true;
      to_dtype(parameters[i].scalar_type());
      parameter.group = 0;
      parameter.gradient_offset = gradient_bytes_;
      gradient_bytes_ += bytes;
      parameter.state_offset = state_bytes_;
    }
    if (updated[i] && with_state) {
      state_bytes_ += 4 * parameter.state_array_bytes();
      if (!parameter.is_half()) state_bytes_ -= parameter.state_array_bytes();
      if (!amsgrad) state_bytes_ -= parameter.state_array_bytes();
    }
    parameters_.push_back(std::move(parameter));
  }
  const bool any = std::find(updated.begin(), updated.end(), true) != updated.end();
  if (with_state && any) state_bytes_ = std::max(state_bytes_, kBlockAlignment);
  plan_ = plan;
  allocate(plan, store);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TorchParameter& parameter = parameters_[i];
    if (parameter.group >= 0 && with_state && parameter.is_half()) {
      parameter.master = state_array(i, kMaster);
      parameter.master.tensor().copy_(parameter.part_of(
          (masters[i].defined() ? masters[i] : parameter.value.tensor()).detach()));
    }
    parameter.value.move_into(newest_block(), device_);
  }
  take_edits(copy);
}

// This rank's part of the parameter.
void TorchUnit::cut(TorchParameter& parameter, RankOf rank) {
  const at::Tensor& value = parameter.value.tensor();
  parameter.part_numel = static_cast<std::size_t>(value.numel());
  if (value.dim() > 0) parameter.num_rows = value.size(0);
  if (rank.size < 2 || value.dim() == 0 || value.numel() == 0 || !value.is_contiguous()) return;
  const std::int64_t rows = value.size(0);
  const std::int64_t each = (rows + rank.size - 1) / rank.size;
  parameter.is_shared = true;
  parameter.first_row = std::min(rank.rank * each, rows);
  parameter.num_rows = std::min(parameter.first_row + each, rows) - parameter.first_row;
  const auto of_a_row = static_cast<std::size_t>(value.numel() / rows);
  parameter.part_begin = static_cast<std::size_t>(parameter.first_row) * of_a_row;
  parameter.part_numel = static_cast<std::size_t>(parameter.num_rows) * of_a_row;
}

std::vector<std::int64_t> TorchParameter::state_sizes() const {
  std::vector<std::int64_t> sizes = value.tensor().sizes().vec();
  if (is_shared) sizes[0] = num_rows;
  return sizes;
}

at::Tensor TorchParameter::part_of(const at::Tensor& whole) const {
  return is_shared ? whole.narrow(0, first_row, num_rows) : whole;
}

// The blocks a plan calls for; those there already are kept.
void TorchUnit::allocate(const UnitPlan& plan, Store& store) {
  const bool host_state = plan.optimizer_state == Tier::kHost;
  const auto host = [&](BlockPtr& block, bool wanted, std::size_t bytes, const char* what) {
    if (!wanted || bytes == 0) {
      block.reset();
    } else if (!block) {
      block = store.allocate_host(bytes, concat(what, " of unit ", name_));
    }
  };
  host(params_host_, plan.parameters == Tier::kHost || host_state,
       std::max(param_bytes_, kBlockAlignment), "parameters");
  host(gradients_host_, host_state, std::max(gradient_bytes_, kBlockAlignment), "gradients");
  if (plan.parameters == Tier::kHost) {
    params_device_.reset();
  } else if (!params_device_) {
    params_device_ = store.allocate_device(std::max(param_bytes_, kBlockAlignment),
                                           concat("parameters of unit ", name_));
  }
  const Tier wanted = plan.optimizer_state;
  if (state_bytes_ == 0 || (state_ && state_->tier() == wanted)) return;
  const std::string what = concat("optimizer state of unit ", name_);
  state_ = wanted == Tier::kHost ? store.allocate_host(state_bytes_, what)
                                 : store.allocate_device(state_bytes_, what);
}

UnitBlocks TorchUnit::blocks() const {
  UnitBlocks blocks;
  blocks.name = name_;
  blocks.plan = plan_;
  blocks.param_bytes = param_bytes_;
  blocks.params_host = params_host_;
  blocks.params_device = params_device_;
  blocks.gradients_host = gradients_host_;
  return blocks;
}

std::size_t TorchUnit::state_offset(std::size_t i, int index) const {
  const TorchParameter& parameter = parameters_[i];
  const int position = index > kMaxExpAvgSq && !amsgrad_ ? index - 1 : index;
  return parameter.state_offset +
         static_cast<std::size_t>(position) * parameter.state_array_bytes();
}

c10::Device TorchUnit::state_device() const {
  return state_->tier() == Tier::kHost ? c10::Device(c10::kCPU) : device_;
}

// A tensor over array `index` of parameter i's state.
HomedTensor TorchUnit::state_array(std::size_t i, int index) const {
  const std::size_t offset = state_offset(i, index);
  const c10::Device device = state_device();
  const at::Tensor& value = parameters_[i].value.tensor();
  at::Tensor array =
      at::empty_strided({0}, {1}, at::TensorOptions().dtype(at::kFloat).device(device));
  const std::size_t bytes = parameters_[i].part_numel * sizeof(float);
  // Resizable, as torch's own: it is an ordinary storage again after leave().
  {
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device),
                         c10::GetAllocator(device.type()), /*resizable=*/true);
    point_storage(*storage.unsafeGetStorageImpl(), state_, offset, device);
    array.set_(storage, 0, parameters_[i].state_sizes(), value.strides());
  }
  HomedTensor homed(array, offset);
  homed.move_into(state_, device);  // already there: takes note of the storage
  return homed;
}

void TorchUnit::rehome(const UnitPlan& plan, Store& store, const CopyAndWait& copy) {
  const BlockPtr old_params = newest_block();
  const BlockPtr old_state = state_;
  const UnitPlan old_plan = plan_;
  drop_spare();
  try {
    allocate(plan, store);
  } catch (...) {
    // As it was: old blocks are still held here.
    (old_plan.parameters == Tier::kHost ? params_host_ : params_device_) = old_params;
    state_ = old_state;
    plan_ = old_plan;
    allocate(old_plan, store);
    throw;
  }
  plan_ = plan;
  if (newest_block() != old_params) copy(newest_block(), old_params);
  if (params_host_ && params_host_ != old_params && params_host_ != newest_block())
    copy(params_host_, old_params);
  point_parameters(newest_block());
  if (state_ == old_state) return;
  copy(state_, old_state);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TorchParameter& parameter = parameters_[i];
    for (HomedTensor* array : {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq,
                               &parameter.master}) {
      if (!array->defined()) continue;
      if (device_.is_cpu()) {
        array->point_at(state_);
      } else {  // the tensor changes its device type: a new tensor, published again by make_state
        const int index = array == &parameter.exp_avg      ? kExpAvg
                          : array == &parameter.exp_avg_sq ? kExpAvgSq
                          : array == &parameter.master     ? kMaster
                                                           : kMaxExpAvgSq;
        *array = state_array(i, index);
      }
    }
  }
}

void TorchUnit::leave(c10::Device device) {
  apply_gradient_factors();
  drop_spare();
  const auto move = [&](HomedTensor& home, const BlockPtr& block) {
    if (home.defined() && !home.replaced()) home.leave(block, device);
    home = HomedTensor();
  };
  for (TorchParameter& parameter : parameters_) {
    for (HomedTensor* home :
         {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq, &parameter.master})
      move(*home, state_);
    if (auto storage = parameter.landed.lock()) copy_out(*storage, Tier::kHost);
    parameter.landed.reset();
    if (!parameter.value.defined()) continue;
    const at::Tensor value = parameter.value.tensor();
    at::Tensor gradient = value.grad();
    if (gradient.defined() && device != value.device()) {
      const at::Tensor away = gradient.to(device);
      value.mutable_grad().reset();  // torch wants them on one device at all times
      gradient = away;
    }
    move(parameter.value, newest_block());
    value.mutable_grad() = gradient;
  }
}

void TorchUnit::point_parameters(const BlockPtr& block) {
  for (TorchParameter& parameter : parameters_) parameter.value.point_at(block);
}

bool TorchUnit::has_replaced() const {
  for (const TorchParameter& parameter : parameters_)
    require(parameter.value.has_our_memory(), "autohete: a parameter of unit ", name_,
            " was given other memory (share_memory_()) after wrapping, expected its own; unwrap() "
            "before sharing it with other processes");
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const TorchParameter& parameter) { return parameter.value.replaced(); });
}

bool TorchUnit::adopt_replaced() {
  bool any = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TorchParameter& parameter = parameters_[i];
    if (!parameter.value.replaced()) continue;
    const at::Tensor& tensor = parameter.value.tensor();
    require(tensor.nbytes() == parameter.value.bytes(), "autohete: a parameter of unit ", name_,
            " has ", tensor.nbytes(), " bytes, expected ", parameter.value.bytes(),
            "; its size or dtype was changed after wrapping: unwrap() before, wrap again after");
    require(!parameter.is_shared || tensor.is_contiguous(), "autohete: a parameter of unit ", name_,
            " was given a layout that is not contiguous, expected one that is: the ranks have rows "
            "of it; use contiguous()");
    parameter.value.move_into(newest_block(), device_);
    lay_out_like_parameter(i);
    any = true;
  }
  return any;
}

// The update goes over parameter, gradient and state in one order of elements.
void TorchUnit::lay_out_like_parameter(std::size_t i) {
  TorchParameter& parameter = parameters_[i];
  const at::Tensor& value = parameter.value.tensor();
  if (auto landed = parameter.landed.lock();
      landed && value.grad().defined() && value.grad().strides() != value.strides()) {
    copy_out(*landed, Tier::kHost);  // new again: it is laid out when it is collected
    parameter.landed.reset();
  }
  HomedTensor* const arrays[] = {&parameter.exp_avg, &parameter.exp_avg_sq,
                                 &parameter.max_exp_avg_sq, &parameter.master};
  for (int index = kExpAvg; index <= kMaster; ++index) {
    HomedTensor& array = *arrays[index];
    if (!array.defined() || array.tensor().strides() == value.strides()) continue;
    const at::Tensor old = array.tensor().clone();
    if (!array.replaced()) array.let_go(state_->tier());
    array = state_array(i, index);
    array.tensor().copy_(old);
    if (relaid_.empty() || relaid_.back() != i) relaid_.push_back(i);
  }
}

void TorchUnit::take_edits(const CopyAndWait& copy) {
  if (params_device_ && params_host_) copy(params_host_, params_device_);
}

namespace {

// Somebody has the gradient's memory by other means than the tensor, so it cannot move.
bool is_held(const at::Tensor& gradient) {
  return gradient.has_storage() && (gradient.storage().use_count() > 1 || has_array(gradient));
}

}  // namespace

bool TorchUnit::has_held_gradients() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const TorchParameter& parameter) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    return parameter.group >= 0 && gradient.defined() && !on_host(parameter, gradient) &&
           is_held(gradient);
  });
}

std::vector<CopySegment> TorchUnit::collect_gradients(bool at_step) {
  std::vector<CopySegment> segments;
  for (TorchParameter& parameter : parameters_) {
    if (parameter.group < 0) continue;
    at::Tensor gradient = parameter.value.tensor().grad();
    if (!gradient.defined()) continue;
    if (on_host(parameter, gradient)) {
      if (!changed_on_host(parameter, gradient)) continue;
      parameter.leaving = gradient;
      parameter.leaving_version = gradient._version();
      leaving_ = true;
      continue;
    }
    if (!at_step && is_held(gradient)) continue;
    parameter.gradient_factor = 1.0F;
    // The user kept last step's gradient: it gets memory of its own.
    if (auto landed = parameter.landed.lock()) copy_out(*landed, Tier::kHost);
    require(gradient.scalar_type() == parameter.value.tensor().scalar_type() &&
                gradient.layout() == at::kStrided,
            "autohete: a gradient of unit ", name_, " is ", c10::toString(gradient.scalar_type()),
            " ", gradient.layout(), ", expected dense ",
            c10::toString(parameter.value.tensor().scalar_type()));
    gradient = exclusive_gradient(parameter.value.tensor(), gradient);
    parameter.leaving = gradient;
    parameter.leaving_version = gradient._version();
    leaving_ = true;
    if (gradient.nbytes() == 0) continue;
    segments.push_back({gradients_host_->data() + parameter.gradient_offset, gradient.data_ptr(),
                        gradient.nbytes()});
  }
  return segments;
}

bool TorchUnit::has_unsent_gradients() const {
  for (const TorchParameter& parameter : parameters_) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    if (parameter.group < 0 || !gradient.defined()) continue;
    if (parameter.leaving.is_same(gradient)) {
      if (gradient._version() != parameter.leaving_version) return true;
      continue;
    }
    if (!on_host(parameter, gradient) || changed_on_host(parameter, gradient)) return true;
  }
  return false;
}

bool TorchUnit::gradients_exchanged() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const TorchParameter& parameter) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    if (parameter.group < 0 || !gradient.defined()) return false;
    if (parameter.leaving.defined()) return !parameter.leaving.is_same(gradient);
    return !parameter.landed.expired() && !on_host(parameter, gradient);
  });
}

bool TorchUnit::on_host(const TorchParameter& parameter, const at::Tensor& gradient) const {
  const auto landed = parameter.landed.lock();
  return landed && gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() == landed.get();
}

// On the host device whoever changed it has returned.
bool TorchUnit::changed_on_host(const TorchParameter& parameter, const at::Tensor& gradient) const {
  return !device_.is_cpu() && gradient._version() != parameter.landed_version;
}

void TorchUnit::land(TorchParameter& parameter, const at::Tensor& gradient) {
  c10::StorageImpl* storage = gradient.storage().unsafeGetStorageImpl();
  point_storage(*storage, gradients_host_, parameter.gradient_offset, gradient.device());
  parameter.landed_version = gradient._version();
  parameter.landed = c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
}

void TorchUnit::land_held_back() {
  for (TorchParameter& parameter : parameters_) {
    const auto held = parameter.held_back.lock();
    if (!held) continue;
    const at::Tensor& gradient = parameter.value.tensor().grad();
    const bool same = gradient.defined() && gradient.unsafeGetTensorImpl() == held.get() &&
                      gradient._version() == parameter.leaving_version;
    if (same && is_held(gradient)) continue;
    if (same) land(parameter, gradient);
    parameter.held_back.reset();
  }
}

bool TorchUnit::land_gradients() {
  bool again = false;
  leaving_ = false;
  for (TorchParameter& parameter : parameters_) {
    if (!parameter.leaving.defined()) continue;
    const at::Tensor gradient = std::exchange(parameter.leaving, at::Tensor());
    if (gradient._version() != parameter.leaving_version) {
      again = true;  // still this parameter's p.grad: collect_gradients() finds it
      continue;
    }
    if (is_held(gradient)) {
      parameter.held_back = c10::weak_intrusive_ptr<c10::TensorImpl>(gradient.getIntrusivePtr());
    } else {
      land(parameter, gradient);
    }
  }
  return again;
}

void TorchUnit::forget_state(std::size_t i) {
  TorchParameter& parameter = parameters_.at(i);
  parameter.step = at::Tensor();
  if (!parameter.master.defined()) return;
  if (!parameter.master.replaced()) parameter.master.let_go(state_->tier());
  parameter.master = state_array(i, kMaster);
  parameter.master.tensor().copy_(parameter.part_of(parameter.value.tensor().detach()));
}

void TorchUnit::make_state(std::size_t i) {
  TorchParameter& parameter = parameters_.at(i);
  for (HomedTensor* old : {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq}) {
    if (old->defined() && !old->replaced()) old->let_go(state_->tier());
  }
  parameter.exp_avg = state_array(i, kExpAvg);
  parameter.exp_avg_sq = state_array(i, kExpAvgSq);
  parameter.exp_avg.tensor().zero_();
  parameter.exp_avg_sq.tensor().zero_();
  if (amsgrad_) {
    parameter.max_exp_avg_sq = state_array(i, kMaxExpAvgSq);
    parameter.max_exp_avg_sq.tensor().zero_();
  }
  parameter.step = at::zeros({}, at::kFloat);
}

void TorchUnit::adopt_state(std::size_t i, at::Tensor step, at::Tensor exp_avg,
                            at::Tensor exp_avg_sq, std::optional<at::Tensor> max_exp_avg_sq,
                            std::optional<at::Tensor> master) {
  TorchParameter& parameter = parameters_.at(i);
  const auto take = [&](HomedTensor& home, const at::Tensor& given, int index) {
    const at::Tensor tensor = given.sizes() == at::IntArrayRef(parameter.state_sizes())
                                  ? given
                                  : parameter.part_of(given);
    if (home.defined() && tensor.is_same(home.tensor()) && !home.replaced()) return;
    if (home.defined() && !home.replaced()) home.let_go(state_->tier());
    const bool as_ours = tensor.scalar_type() == at::kFloat && tensor.device() == state_device() &&
                         tensor.strides() == parameter.value.tensor().strides() &&
                         owns_its_storage(tensor) && !stands_in_a_block(tensor.storage());
    if (as_ours) {  // the user's tensor itself, as plain PyTorch does
      home = HomedTensor(tensor, state_offset(i, index));
      home.move_into(state_, state_device());
      return;
    }
    HomedTensor fresh = state_array(i, index);
    fresh.tensor().copy_(tensor.detach());
    home = std::move(fresh);
  };
  take(parameter.exp_avg, exp_avg, kExpAvg);
  take(parameter.exp_avg_sq, exp_avg_sq, kExpAvgSq);
  if (amsgrad_ && max_exp_avg_sq) take(parameter.max_exp_avg_sq, *max_exp_avg_sq, kMaxExpAvgSq);
  if (parameter.is_half() && master) take(parameter.master, *master, kMaster);
  parameter.step = step.is_cpu() && step.scalar_type() == at::kFloat
                       ? step
                       : step.detach().to(at::kCPU, at::kFloat);
}

std::vector<AdamSpan> TorchUnit::make_spans(const std::vector<AdamHyper>& hypers) {
  std::vector<AdamSpan> spans;
  for (TorchParameter& parameter : parameters_) {
    const at::Tensor& value = parameter.value.tensor();
    if (parameter.group < 0 || !value.grad().defined()) continue;
    AH_ASSERT(parameter.step.defined());
    *parameter.step.data_ptr<float>() += 1.0F;
    value.unsafeGetTensorImpl()->bump_version();
    if (parameter.part_numel > 0) spans.push_back(span_at_home(parameter, hypers));
  }
  return spans;
}

// The step that the parameter's counter stands at, in place.
AdamSpan TorchUnit::span_at_home(TorchParameter& parameter, const std::vector<AdamHyper>& hypers) {
  const at::Tensor& value = parameter.value.tensor();
  const bool host = plan_.optimizer_state == Tier::kHost;
  AdamSpan span;
  span.step = *parameter.step.data_ptr<float>();
  span.numel = parameter.part_numel;
  const std::size_t begin_bytes = parameter.part_begin * value.element_size();
  span.hyper = hypers.at(static_cast<std::size_t>(parameter.group));
  span.hyper.grad_scale *= parameter.gradient_factor;
  span.grad_dtype = to_dtype(value.grad().scalar_type());
  if (host) {
    span.grad = gradients_host_->data() + parameter.gradient_offset + begin_bytes;
  } else {
    span.grad = static_cast<const std::byte*>(exclusive_gradient(value, value.grad()).data_ptr()) +
                begin_bytes;
  }
  std::byte* home =
      (host ? params_host_ : params_device_)->data() + parameter.value.offset() + begin_bytes;
  float* master = parameter.is_half() ? parameter.master.tensor().data_ptr<float>()
                                      : reinterpret_cast<float*>(home);
  span.param_in = span.param_out = master;
  if (parameter.is_half()) {
    span.half_in = span.half_out = home;
    span.half_dtype = to_dtype(value.scalar_type());
  }
  span.exp_avg_in = span.exp_avg_out = parameter.exp_avg.tensor().data_ptr<float>();
  span.exp_avg_sq_in = span.exp_avg_sq_out = parameter.exp_avg_sq.tensor().data_ptr<float>();
  if (amsgrad_) {
    span.max_exp_avg_sq_in = span.max_exp_avg_sq_out =
        parameter.max_exp_avg_sq.tensor().data_ptr<float>();
  }
  return span;
}

bool TorchUnit::reserve_spare(Store& store) {
  if (spare_state_ || plan_.optimizer_state != Tier::kHost || state_bytes_ == 0) return true;
  const bool pinned = store.pins_host_memory();
  try {
    spare_params_ =
        store.allocate_host(params_host_->bytes(), concat("second parameters of unit ", name_));
    spare_state_ = store.allocate_host(state_bytes_, concat("second state of unit ", name_));
    if (store.pins_host_memory() == pinned) return true;
  } catch (const std::exception&) {  // OutOfMemory: go without
  }
  drop_spare();  // also where pinning was refused: the device may not be able to read it
  return false;
}

std::size_t TorchUnit::bytes_of_spare() const {
  const bool wanted = plan_.optimizer_state == Tier::kHost && state_bytes_ > 0;
  return wanted ? params_host_->bytes() + state_bytes_ : 0;
}

void TorchUnit::drop_spare() {
  spare_params_.reset();
  spare_state_.reset();
}

std::size_t TorchUnit::spare_bytes() const {
  return spare_state_ ? spare_params_->bytes() + spare_state_->bytes() : 0;
}

std::vector<AdamSpan> TorchUnit::spans_ahead_in_place(const std::vector<AdamHyper>& hypers) {
  if (plan_.optimizer_state != Tier::kHost) return {};
  std::vector<AdamSpan> spans;
  for (TorchParameter& parameter : parameters_) {
    const at::Tensor& value = parameter.value.tensor();
    if (parameter.group < 0 || !value.grad().defined() || !parameter.step.defined()) return {};
    if (parameter.part_numel == 0) continue;
    spans.push_back(span_at_home(parameter, hypers));
    spans.back().step += 1;
  }
  return spans;
}

std::vector<AdamSpan> TorchUnit::spans_ahead(const std::vector<AdamHyper>& hypers) {
  if (!spare_state_) return {};
  std::vector<AdamSpan> spans = spans_ahead_in_place(hypers);
  for (AdamSpan& span : spans) {
    const auto in_spare = [&](void* at_home) -> void* {
      const auto* byte = static_cast<const std::byte*>(at_home);
      const bool state = byte >= state_->data() && byte < state_->data() + state_->bytes();
      const BlockPtr& home = state ? state_ : params_host_;
      const BlockPtr& spare = state ? spare_state_ : spare_params_;
      return spare->data() + (byte - home->data());
    };
    span.param_out = static_cast<float*>(in_spare(span.param_out));
    span.exp_avg_out = in_spare(span.exp_avg_out);
    span.exp_avg_sq_out = in_spare(span.exp_avg_sq_out);
    if (amsgrad_) span.max_exp_avg_sq_out = in_spare(span.max_exp_avg_sq_out);
    if (span.half_out) span.half_out = in_spare(span.half_out);
  }
  return spans;
}

bool TorchUnit::has_aliases() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const TorchParameter& parameter) {
    return parameter.value.has_aliases() || parameter.exp_avg.has_aliases() ||
           parameter.exp_avg_sq.has_aliases() || parameter.max_exp_avg_sq.has_aliases() ||
           parameter.master.has_aliases();
  });
}

void TorchUnit::note_offered() {
  for (TorchParameter& parameter : parameters_) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    if (gradient.defined()) parameter.offered_version = gradient._version();
  }
}

bool TorchUnit::offered_there() const {
  return std::all_of(parameters_.begin(), parameters_.end(), [&](const TorchParameter& parameter) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    if (!gradient.defined()) return false;
    // One that is leaving may land at any moment, and its update start; it is the same one still.
    if (parameter.leaving.is_same(gradient))
      return gradient._version() == parameter.leaving_version;
    return on_host(parameter, gradient);
  });
}

bool TorchUnit::offered_unchanged() const {
  return offered_there() &&
         std::all_of(parameters_.begin(), parameters_.end(), [](const TorchParameter& parameter) {
           const at::Tensor& gradient = parameter.value.tensor().grad();
           return gradient._version() == parameter.offered_version &&
                  gradient.storage().use_count() == 1 && !has_array(gradient);
         });
}

bool TorchUnit::offered_alone() const {
  return std::all_of(parameters_.begin(), parameters_.end(), [](const TorchParameter& parameter) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    return gradient.use_count() == (parameter.leaving.is_same(gradient) ? 2 : 1);
  });
}

void TorchUnit::swap_spare() {
  AH_ASSERT(spare_state_ && spare_params_);
  std::swap(params_host_, spare_params_);
  std::swap(state_, spare_state_);
  if (plan_.parameters == Tier::kHost) point_parameters(params_host_);
  for (TorchParameter& parameter : parameters_) {
    for (HomedTensor* array : {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq,
                               &parameter.master}) {
      if (array->defined() && !array->replaced()) array->point_at(state_);
    }
  }
}

std::vector<at::Tensor> TorchUnit::host_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const TorchParameter& parameter : parameters_) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    const bool here = parameter.group >= 0 && gradient.defined() && gradient.numel() > 0;
    gradients.push_back(here ? tensor_over(gradients_host_, parameter.gradient_offset, gradient)
                             : at::Tensor());
  }
  return gradients;
}

bool TorchUnit::has_gradients() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const TorchParameter& parameter) {
    return parameter.group >= 0 && parameter.value.tensor().grad().defined();
  });
}

std::size_t TorchUnit::device_gradient_bytes() const {
  std::size_t bytes = 0;
  for (const TorchParameter& parameter : parameters_) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    if (gradient.defined() && !on_host(parameter, gradient)) bytes += gradient.nbytes();
  }
  return bytes;
}

std::vector<at::Tensor> TorchUnit::shared_parameters() const {
  std::vector<at::Tensor> shared;
  for (const TorchParameter& parameter : parameters_) {
    const at::Tensor& value = parameter.value.tensor();
    if (parameter.is_shared && parameter.group >= 0 && value.grad().defined())
      shared.push_back(tensor_over(params_host_, parameter.value.offset(), value));
  }
  return shared;
}

bool TorchUnit::has_gradient_factors() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const TorchParameter& parameter) {
    return parameter.gradient_factor != 1.0F && parameter.value.tensor().grad().defined();
  });
}

void TorchUnit::apply_gradient_factors() {
  for (TorchParameter& parameter : parameters_) {
    const float factor = std::exchange(parameter.gradient_factor, 1.0F);
    if (factor == 1.0F) continue;
    const at::Tensor& gradient = parameter.value.tensor().grad();
    if (!gradient.defined() || !on_host(parameter, gradient)) continue;
    tensor_over(gradients_host_, parameter.gradient_offset, gradient).mul_(factor);
    gradient.unsafeGetTensorImpl()->bump_version();
  }
}

std::uint64_t TorchUnit::versions() const {
  std::uint64_t sum = 0;
  for (const TorchParameter& parameter : parameters_) sum += parameter.value.tensor()._version();
  return sum;
}

}  // namespace autohete
