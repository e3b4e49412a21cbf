// How a unit's gradients change sides, and whether somebody changed them meanwhile.
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/bindings/owners.h"
#include "csrc/bindings/torch_unit.h"
#include "csrc/bindings/unit_parts.h"

namespace autohete {
namespace {

// Somebody has the gradient's memory by other means than the tensor, which has `num_owners` here:
// it cannot move, and may change unseen.
bool is_held(const at::Tensor& gradient, std::size_t num_owners) {
  return gradient.has_storage() && (gradient.storage().use_count() > 1 || has_array(gradient) ||
                                    !is_alone_in_cpp(gradient, num_owners));
}

// Of the gradient that a parameter has: its own, and where it is leaving, that one.
std::size_t num_owners(const TorchParameter& parameter, const at::Tensor& gradient) {
  return parameter.leaving.is_same(gradient) ? 2 : 1;
}

}  // namespace

bool is_landed_held(const TorchParameter& parameter) {
  const auto storage = parameter.landed.lock();
  if (!storage) return false;
  if (storage.use_count() > 2 || !storage->resizable()) return true;  // the tensor's, and ours here
  const auto impl = parameter.landed_tensor.lock();
  if (!impl) return false;
  const at::Tensor gradient(impl);
  const std::size_t ours = parameter.value.tensor().grad().is_same(gradient) ? 3 : 2;
  return !is_alone_in_cpp(gradient, ours);
}

at::Tensor exclusive_gradient(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (owns_its_storage(gradient) && gradient.strides() == parameter.strides() &&
      !gradient.is_neg() && !stands_in_a_block(gradient.storage()))
    return gradient;
  at::Tensor copy = at::empty_strided(parameter.sizes(), parameter.strides(), gradient.options());
  copy.copy_(gradient.detach());
  parameter.mutable_grad() = copy;
  return copy;
}

bool TorchUnit::has_held_gradients() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const TorchParameter& parameter) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    return parameter.group >= 0 && gradient.defined() && !on_host(parameter, gradient) &&
           is_held(gradient, num_owners(parameter, gradient));
  });
}

bool TorchUnit::has_landed_gradients() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const TorchParameter& parameter) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    return gradient.defined() && on_host(parameter, gradient);
  });
}

bool TorchUnit::changed_while_leaving() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const TorchParameter& parameter) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    return parameter.leaving.defined() && (!parameter.leaving.is_same(gradient) ||
                                           gradient._version() != parameter.leaving_version);
  });
}

BlockPtr TorchUnit::gradient_block(const TorchParameter& parameter) const {
  return parameter.gradient_block ? parameter.gradient_block : gradients_host_;
}

std::size_t TorchUnit::gradient_offset(const TorchParameter& parameter) const {
  return parameter.gradient_block ? 0 : parameter.offsets.gradient;
}

at::Tensor TorchUnit::host_gradient(const TorchParameter& parameter,
                                    const at::Tensor& gradient) const {
  return tensor_over(gradient_block(parameter), gradient_offset(parameter), gradient);
}

// Where the user kept the last gradient, one of the two gets memory of its own: the kept one,
// unless somebody may know that by address (a NumPy array, a DLPack capsule).
void TorchUnit::make_room_for_gradient(TorchParameter& parameter) {
  const auto landed = parameter.landed.lock();
  if (!landed) return;
  if (!is_landed_held(parameter)) return copy_out(*landed, Tier::kHost);
  const at::Tensor& value = parameter.value.tensor();
  parameter.gradient_block =
      block_beside(parameter, value.nbytes(), Tier::kHost,
                   concat("a gradient of unit ", name_, ", beside one that was kept,"));
  if (own_gradients_ && parameter.is_shared) mark_other_gradients(parameter);
}

std::vector<CopySegment> TorchUnit::collect_gradients(bool at_step, bool averaged) {
  const bool own_rows = own_gradients_ && averaged && others_marked_;
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
    if (parameter.leaving.is_same(gradient) && gradient._version() == parameter.leaving_version)
      continue;
    if (!at_step && is_held(gradient, 1 + num_owners(parameter, gradient))) continue;
    parameter.gradient_factor = 1.0F;
    make_room_for_gradient(parameter);
    require(gradient.scalar_type() == parameter.value.tensor().scalar_type() &&
                gradient.layout() == at::kStrided,
            "autohete: a gradient of unit ", name_, " is ", c10::toString(gradient.scalar_type()),
            " ", gradient.layout(), ", expected dense ",
            c10::toString(parameter.value.tensor().scalar_type()));
    gradient = exclusive_gradient(parameter.value.tensor(), gradient);
    parameter.leaving = gradient;
    parameter.leaving_version = gradient._version();
    leaving_ = true;
    const CopySegment segment = gradient_segment(parameter, gradient, own_rows);
    if (segment.bytes > 0) segments.push_back(segment);
  }
  if (!segments.empty()) others_marked_ = averaged;
  return segments;
}

CopySegment TorchUnit::gradient_segment(const TorchParameter& parameter, const at::Tensor& gradient,
                                        bool own_rows) const {
  std::byte* to = gradient_block(parameter)->data() + gradient_offset(parameter);
  std::byte* from = static_cast<std::byte*>(gradient.data_ptr());
  if (!own_rows) return {to, from, gradient.nbytes()};
  const std::size_t begin = parameter.part_begin * gradient.element_size();
  return {to + begin, from + begin, parameter.part_numel * gradient.element_size()};
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
  point_storage(*storage, gradient_block(parameter), gradient_offset(parameter), gradient.device());
  parameter.landed_tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(gradient.getIntrusivePtr());
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
    if (same && is_held(gradient, 1 + num_owners(parameter, gradient))) continue;
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
    const bool is_its = parameter.value.tensor().grad().is_same(gradient);
    if (is_held(gradient, is_its ? 2 : 1)) {
      parameter.held_back = c10::weak_intrusive_ptr<c10::TensorImpl>(gradient.getIntrusivePtr());
    } else {
      land(parameter, gradient);
    }
  }
  return again;
}

bool TorchUnit::note_offered(bool leaving) {
  bool held = false;
  for (TorchParameter& parameter : parameters_) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    if (!gradient.defined() || (leaving && !parameter.leaving.is_same(gradient))) continue;
    parameter.offered_version = gradient._version();
    held = held || is_held(gradient, num_owners(parameter, gradient));
  }
  return held;
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
    return is_alone(gradient, num_owners(parameter, gradient));
  });
}

std::vector<at::Tensor> TorchUnit::host_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const TorchParameter& parameter : parameters_) {
    const at::Tensor& gradient = parameter.value.tensor().grad();
    const bool here = parameter.group >= 0 && gradient.defined() && gradient.numel() > 0;
    gradients.push_back(here ? host_gradient(parameter, gradient) : at::Tensor());
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
    host_gradient(parameter, gradient).mul_(factor);
    gradient.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace autohete
