// A unit's optimizer state, what an update reads and writes of it, and its second copy.
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/bindings/torch_unit.h"
#include "csrc/bindings/unit_parts.h"
#include "csrc/kernels/hash_run.h"

namespace autohete {

c10::Device TorchUnit::state_device() const {
  return state_->tier() == Tier::kHost ? c10::Device(c10::kCPU) : device_;
}

// A tensor over array `index` of parameter i's state, or `apart`.
HomedTensor TorchUnit::state_array(std::size_t i, int index, const BlockPtr& apart) const {
  const std::size_t offset = parameters_[i].offsets.state.at(index);
  const c10::Device device = state_device();
  const at::Tensor& value = parameters_[i].value.tensor();
  at::Tensor array =
      at::empty_strided({0}, {1}, at::TensorOptions().dtype(at::kFloat).device(device));
  const std::size_t bytes = parameters_[i].part_numel * sizeof(float);
  // Resizable, as torch's own: it is an ordinary storage again after leave().
  {
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device),
                         c10::GetAllocator(device.type()), /*resizable=*/true);
    point_storage(*storage.unsafeGetStorageImpl(), apart ? apart : state_, apart ? 0 : offset,
                  device);
    array.set_(storage, 0, parameters_[i].state_sizes(), value.strides());
  }
  HomedTensor homed(array, offset, apart);
  homed.move_into(state_, device);  // already there: takes note of the storage
  return homed;
}

// The tensor is not the state's any more. Whoever holds it keeps its values: it gets memory of its
// own. Where somebody may know its memory by address it stays in the block instead, and the array
// that comes gets the memory that this returns.
BlockPtr TorchUnit::part_from(const TorchParameter& parameter, HomedTensor& old) {
  if (!old.defined() || old.replaced()) return nullptr;
  if (!old.is_apart() && !is_known(old)) {
    old.let_go(state_->tier());
    return nullptr;
  }
  state_is_shared_ = true;
  const std::string what =
      concat("optimizer state of unit ", name_, ", beside some that was kept,");
  return block_beside(parameter, old.bytes(), state_->tier(), what);
}

// Memory for a stream of the parameter's update that cannot be at its place in the unit's block.
BlockPtr TorchUnit::block_beside(const TorchParameter& parameter, std::size_t bytes, Tier tier,
                                 const std::string& what) {
  std::vector<std::size_t> others;
  const auto note = [&](const void* begin) {
    others.push_back(reinterpret_cast<std::uintptr_t>(begin));
  };
  for (const BlockPtr& block : {params_host_, params_device_})
    if (block) note(block->data() + parameter.offsets.param);
  if (gradients_host_) note(gradient_block(parameter)->data() + gradient_offset(parameter));
  for (const HomedTensor* array :
       {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq, &parameter.master})
    if (array->defined()) note(array->tensor().const_data_ptr());
  const std::size_t lead = bytes >= kLargeStreamBytes ? place_apart(0, kBlockAlignment, others) : 0;
  const std::size_t whole = lead + std::max(align_up(bytes), kBlockAlignment);
  return begin_behind(
      tier == Tier::kHost ? store_.allocate_host(whole, what) : store_.allocate_device(whole, what),
      lead);
}

void TorchUnit::join_state() {
  if (!state_is_shared_) return;
  std::vector<HomedTensor*> apart;
  long num_owners = 1;  // of the block: the unit, and the storages of those that are at home
  for (TorchParameter& parameter : parameters_) {
    for (HomedTensor* array : {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq,
                               &parameter.master}) {
      if (!array->defined()) continue;
      if (array->replaced()) return;  // adopt_state() comes first
      if (array->is_apart()) {
        apart.push_back(array);
      } else {
        ++num_owners;
      }
    }
  }
  if (state_.use_count() > num_owners) return;
  for (HomedTensor* array : apart) {
    keep_or_forget(*array, /*moves=*/true);
    array->join(state_);
  }
  state_is_shared_ = false;
}

void TorchUnit::forget_state(std::size_t i) {
  TorchParameter& parameter = parameters_.at(i);
  parameter.step = at::Tensor();
  if (!parameter.master.defined()) return;
  parameter.master = state_array(i, kMaster, part_from(parameter, parameter.master));
  parameter.master.tensor().copy_(parameter.part_of(parameter.value.tensor().detach()));
}

void TorchUnit::make_state(std::size_t i) {
  TorchParameter& parameter = parameters_.at(i);
  const auto make = [&](HomedTensor& array, int index) {
    array = state_array(i, index, part_from(parameter, array));
    array.tensor().zero_();
  };
  make(parameter.exp_avg, kExpAvg);
  make(parameter.exp_avg_sq, kExpAvgSq);
  if (amsgrad_) make(parameter.max_exp_avg_sq, kMaxExpAvgSq);
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
    const BlockPtr apart = part_from(parameter, home);
    const bool as_ours = tensor.scalar_type() == at::kFloat && tensor.device() == state_device() &&
                         tensor.strides() == parameter.value.tensor().strides() &&
                         owns_its_storage(tensor) && !stands_in_a_block(tensor.storage());
    if (as_ours) {  // the user's tensor itself, as plain PyTorch does
      home = HomedTensor(tensor, parameter.offsets.state.at(index), apart);
      home.move_into(state_, state_device());
      return;
    }
    HomedTensor fresh = state_array(i, index, apart);
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
    span.grad = gradient_block(parameter)->data() + gradient_offset(parameter) + begin_bytes;
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
    const auto allocate = [&](std::size_t bytes, const char* what) {
      return begin_behind(store.allocate_host(bytes + spare_lead_, concat(what, name_)),
                          spare_lead_);
    };
    spare_params_ = allocate(params_host_->bytes(), "second parameters of unit ");
    spare_state_ = allocate(state_bytes_, "second state of unit ");
    if (store.pins_host_memory() == pinned) return true;
  } catch (const std::exception&) {  // OutOfMemory: go without
  }
  spare_params_.reset();  // also where pinning was refused: the device may not be able to read it
  spare_state_.reset();
  return false;
}

std::size_t TorchUnit::bytes_of_spare() const {
  const bool wanted = plan_.optimizer_state == Tier::kHost && state_bytes_ > 0;
  return wanted ? params_host_->bytes() + state_bytes_ + 2 * spare_lead_ : 0;
}

// A DLPack capsule of a state's tensor may have been made when that stood in these.
void TorchUnit::drop_spare() {
  for (TorchParameter& parameter : parameters_) {
    if (!spare_state_) break;
    for (HomedTensor* array :
         {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq, &parameter.master})
      if (array->defined() && is_known(*array)) array->keep_memory(spare_state_);
  }
  spare_params_.reset();
  spare_state_.reset();
}

std::size_t TorchUnit::spare_bytes() const { return spare_state_ ? bytes_of_spare() : 0; }

std::vector<AdamSpan> TorchUnit::spans_ahead_in_place(const std::vector<AdamHyper>& hypers) {
  if (plan_.optimizer_state != Tier::kHost) return {};
  std::vector<AdamSpan> spans;
  for (TorchParameter& parameter : parameters_) {
    if (!can_update_ahead(parameter)) return {};
    if (parameter.part_numel == 0) continue;
    spans.push_back(span_at_home(parameter, hypers));
    spans.back().step += 1;
  }
  return spans;
}

bool TorchUnit::can_update_ahead(const TorchParameter& parameter) const {
  return parameter.group >= 0 && parameter.value.tensor().grad().defined() &&
         parameter.step.defined() && !parameter.has_replaced_state();
}

std::vector<AdamSpan> TorchUnit::spans_ahead(const std::vector<AdamHyper>& hypers) {
  if (!spare_state_) return {};
  std::vector<AdamSpan> spans = spans_ahead_in_place(hypers);
  for (AdamSpan& span : spans) span = into_spare(span);
  return spans;
}

AdamSpan TorchUnit::into_spare(AdamSpan span) const {
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
  return span;
}

PlacedSpans TorchUnit::leaving_spans_ahead(const std::vector<AdamHyper>& hypers) {
  PlacedSpans placed;
  if (!spare_state_) return placed;
  const std::vector<std::uint64_t> positions = hash_positions();
  std::size_t place = 0;
  for (TorchParameter& parameter : parameters_) {
    if (parameter.part_numel == 0) continue;
    const std::uint64_t position = positions[place++];
    if (!parameter.leaving.defined()) continue;
    if (!can_update_ahead(parameter)) return {};
    placed.spans.push_back(into_spare(span_at_home(parameter, hypers)));
    placed.spans.back().step += 1;
    placed.positions.push_back(position);
  }
  return placed;
}

std::vector<std::uint64_t> TorchUnit::hash_positions() const {
  std::vector<std::uint64_t> positions;
  std::uint64_t position = 0;
  for (const TorchParameter& parameter : parameters_) {
    if (parameter.part_numel == 0) continue;
    positions.push_back(position);
    position += hashed_items(parameter.part_numel);
  }
  return positions;
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

}  // namespace autohete
