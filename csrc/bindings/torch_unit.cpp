// Where a unit's tensors live. What they need and at which offsets: torch_unit_layout.cpp; how
// gradients change sides: torch_unit_gradients.cpp; what updates read and write:
// torch_unit_state.cpp.
#include "csrc/bindings/torch_unit.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/bindings/owners.h"
#include "csrc/bindings/unit_parts.h"

namespace autohete {

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

bool is_known(const HomedTensor& home) {
  const at::Tensor& tensor = home.tensor();
  // Torch makes arrays and capsules of a parameter by another tensor, which is an alias.
  return tensor.is_cpu() &&
         (home.has_aliases() || (!tensor.requires_grad() && !is_alone_in_cpp(tensor, 1)));
}

void keep_or_forget(HomedTensor& home, bool moves) {
  if (!home.defined()) return;
  if (!is_known(home)) {
    home.forget_kept();
  } else if (moves) {
    home.keep_memory();
  }
}

TorchUnit::TorchUnit(std::string name, const std::vector<at::Tensor>& parameters,
                     const std::vector<at::Tensor>& masters, const std::vector<bool>& updated,
                     bool with_state, bool amsgrad, const UnitPlan& plan, Store& store,
                     c10::Device device, const CopyAndWait& copy, RankOf rank)
    : store_(store),
      name_(std::move(name)),
      device_(device),
      amsgrad_(amsgrad),
      own_gradients_(rank.own_gradients) {
  AH_ASSERT(parameters.size() == masters.size() && parameters.size() == updated.size());
  std::vector<StreamSizes> sizes;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TorchParameter parameter;
    parameter.value = HomedTensor(parameters[i], 0);
    cut(parameter, rank);
    if (updated[i]) {
      parameter.has_room = true;
      to_dtype(parameters[i].scalar_type());
      parameter.group = 0;
    }
    sizes.push_back(parameter.sizes(with_state, amsgrad));
    parameters_.push_back(std::move(parameter));
  }
  take_layout(lay_out(sizes));
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

// The blocks a plan calls for; those there already are kept.
void TorchUnit::allocate(const UnitPlan& plan, Store& store) {
  const bool host_state = plan.optimizer_state == Tier::kHost;
  const auto host = [&](BlockPtr& block, bool wanted, std::size_t bytes, const char* what,
                        Pages pages) {
    if (!wanted || bytes == 0) {
      block.reset();
    } else if (!block) {
      block = store.allocate_host(bytes, concat(what, " of unit ", name_), pages);
    }
  };
  if (params_host_) former_params_host_ = params_host_;
  if (params_device_) former_params_device_ = params_device_;
  if (!params_host_) params_host_ = former_params_host_.lock();
  host(params_host_, plan.parameters == Tier::kHost || host_state,
       std::max(param_bytes_, kBlockAlignment), "parameters", Pages::kWhenTouched);
  const bool had_gradients = gradients_host_ != nullptr;
  // The first step's copies write all of it, and the plan is made by how long they take.
  host(gradients_host_, host_state, std::max(gradient_bytes_, kBlockAlignment), "gradients",
       Pages::kNow);
  if (own_gradients_ && gradients_host_ && !had_gradients) mark_other_gradients();
  if (plan.parameters == Tier::kHost) {
    params_device_.reset();
  } else if (!params_device_ && !(params_device_ = former_params_device_.lock())) {
    params_device_ = store.allocate_device(std::max(param_bytes_, kBlockAlignment),
                                           concat("parameters of unit ", name_));
  }
  const Tier wanted = plan.optimizer_state;
  if (state_bytes_ == 0 || (state_ && state_->tier() == wanted)) return;
  const std::string what = concat("optimizer state of unit ", name_);
  const bool to_host = wanted == Tier::kHost;
  BlockPtr state = (to_host ? former_state_host_ : former_state_device_).lock();
  if (!state) {
    state = to_host ? store.allocate_host(state_bytes_, what)
                    : store.allocate_device(state_bytes_, what);
  }
  if (state_ && !std::exchange(state_is_shared_, false))
    (to_host ? former_state_device_ : former_state_host_) = state_;
  state_ = std::move(state);
}

// What other ranks have of the gradients is never copied here.
void TorchUnit::mark_other_gradients() {
  for (const TorchParameter& parameter : parameters_)
    if (parameter.has_room && parameter.is_shared) mark_other_gradients(parameter);
  others_marked_ = true;
}

void TorchUnit::mark_other_gradients(const TorchParameter& parameter) {
  host_gradient(parameter, parameter.value.tensor().detach())
      .fill_(std::numeric_limits<double>::quiet_NaN());
}

UnitBlocks TorchUnit::blocks() const {
  UnitBlocks blocks;
  blocks.name = name_;
  blocks.plan = plan_;
  blocks.param_bytes = param_bytes_;
  for (const TorchParameter& parameter : parameters_)
    blocks.param_offsets.push_back(parameter.value.offset());
  blocks.params_host = params_host_;
  blocks.params_device = params_device_;
  blocks.gradients_host = gradients_host_;
  return blocks;
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
  for (TorchParameter& parameter : parameters_)
    keep_or_forget(parameter.value, newest_block() != old_params);
  if (newest_block() != old_params) copy(newest_block(), old_params);
  if (params_host_ && params_host_ != old_params && params_host_ != newest_block())
    copy(params_host_, old_params);
  point_parameters(newest_block());
  for (TorchParameter& parameter : parameters_) {
    for (HomedTensor* array :
         {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq, &parameter.master})
      keep_or_forget(*array, state_ != old_state);
  }
  if (state_ == old_state) return;
  copy(state_, old_state);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    TorchParameter& parameter = parameters_[i];
    for (HomedTensor* array : {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq,
                               &parameter.master}) {
      if (!array->defined()) continue;
      if (device_.is_cpu()) {
        array->is_apart() ? array->join(state_) : array->point_at(state_);
      } else {  // the tensor changes its device type: a new tensor, published again by make_state
        const int index = array == &parameter.exp_avg      ? kExpAvg
                          : array == &parameter.exp_avg_sq ? kExpAvgSq
                          : array == &parameter.master     ? kMaster
                                                           : kMaxExpAvgSq;
        const at::Tensor apart = array->is_apart() ? array->tensor() : at::Tensor();
        *array = state_array(i, index);
        if (apart.defined()) array->tensor().copy_(apart);
      }
    }
  }
}

// Somebody may know the tensor's memory by address: it stays theirs, in a block that the storage
// holds.
bool TorchUnit::stays(const HomedTensor& home, c10::Device device, std::size_t num_owners) {
  const at::Tensor& tensor = home.tensor();
  return device.is_cpu() && tensor.is_cpu() &&
         (home.has_aliases() || has_array(tensor) || !is_alone_in_cpp(tensor, num_owners));
}

void TorchUnit::leave(c10::Device device) {
  apply_gradient_factors();
  drop_spare();
  const auto move = [&](HomedTensor& home, const BlockPtr& block, std::size_t num_owners) {
    if (home.defined() && !home.replaced() && !stays(home, device, num_owners)) {
      if (!is_known(home)) home.forget_kept();
      home.leave(block, device);
    }
    home = HomedTensor();
  };
  for (TorchParameter& parameter : parameters_) {
    for (HomedTensor* home :
         {&parameter.exp_avg, &parameter.exp_avg_sq, &parameter.max_exp_avg_sq, &parameter.master})
      move(*home, state_, 1);
    const bool kept = device.is_cpu() && is_landed_held(parameter);
    if (auto storage = parameter.landed.lock(); storage && !kept) copy_out(*storage, Tier::kHost);
    parameter.landed.reset();
    if (!parameter.value.defined()) continue;
    const at::Tensor value = parameter.value.tensor();
    at::Tensor gradient = value.grad();
    if (gradient.defined() && device != value.device()) {
      const at::Tensor away = gradient.to(device);
      value.mutable_grad().reset();  // torch wants them on one device at all times
      gradient = away;
    }
    move(parameter.value, newest_block(), 2);
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
    array = state_array(i, index, part_from(parameter, array));
    array.tensor().copy_(old);
    if (relaid_.empty() || relaid_.back() != i) relaid_.push_back(i);
  }
}

void TorchUnit::take_edits(const CopyAndWait& copy) {
  if (params_device_ && params_host_) copy(params_host_, params_device_);
}

// It cannot change places with its second copy.
static bool is_fixed(const TorchParameter& parameter) {
  const auto fixed = [](const HomedTensor& home) { return home.has_aliases() || home.is_apart(); };
  return fixed(parameter.value) || fixed(parameter.exp_avg) || fixed(parameter.exp_avg_sq) ||
         fixed(parameter.max_exp_avg_sq) || fixed(parameter.master);
}

bool TorchUnit::has_aliases() const {
  return std::any_of(parameters_.begin(), parameters_.end(), is_fixed);
}

bool TorchUnit::has_aliases_beside_gradients() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const TorchParameter& parameter) {
    return parameter.value.tensor().grad().defined() && is_fixed(parameter);
  });
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

std::uint64_t TorchUnit::versions() const {
  std::uint64_t sum = 0;
  for (const TorchParameter& parameter : parameters_) sum += parameter.value.tensor()._version();
  return sum;
}

}  // namespace autohete
