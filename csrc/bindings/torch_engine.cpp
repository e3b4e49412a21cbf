// What moves when; ahead of step(): torch_engine_ahead.cpp, at step(): torch_engine_step.cpp.
#include "csrc/bindings/torch_engine.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/kernels/kernels.h"

namespace autohete {

using NoGil = pybind11::gil_scoped_release;

TorchEngine::TorchEngine(DeviceHandle handle, int num_workers)
    : handle_(std::move(handle)),
      workers_(num_workers > 0 ? num_workers : default_num_workers()),
      copy_streams_{handle_.device->create_stream(CopyDirection::kHostToDevice),
                    handle_.device->create_stream(CopyDirection::kDeviceToHost)},
      engine_(*handle_.device, *handle_.store) {
  engine_.set_wait_tick([] {
    const pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();  // Ctrl-C
  });
}

TorchEngine::~TorchEngine() {
  NoGil no_gil;  // what other ranks are waited with needs it
  engine_.stop();
}

void TorchEngine::set_ranks(RankOf rank, Share share) {
  rank_ = rank;
  share_ = std::move(share);
}

int TorchEngine::add_unit(const std::string& name, const std::vector<at::Tensor>& parameters,
                          const std::vector<std::optional<at::Tensor>>& masters,
                          const std::vector<bool>& updated, bool with_state, bool amsgrad,
                          const UnitPlan& plan) {
  std::vector<at::Tensor> known;
  for (const std::optional<at::Tensor>& master : masters)
    known.push_back(master.value_or(at::Tensor()));
  units_.push_back(std::make_unique<TorchUnit>(name, parameters, known, updated, with_state,
                                               amsgrad, plan, *handle_.store, handle_.torch_device,
                                               copier(), rank_));
  versions_.push_back(0);
  users_.push_back(0);
  touched_.push_back(false);
  gradients_touched_.push_back(false);
  offers_.emplace_back();
  more_gradients_.push_back(false);
  return num_units() - 1;
}

CopyAndWait TorchEngine::copier() {
  return [this](const BlockPtr& dst, const BlockPtr& src) {
    Device& device = *handle_.device;
    const bool to_device = dst->tier() == Tier::kDevice;
    const StreamId stream = copy_streams_[to_device ? 0 : 1];
    use_current_stream();
    device.wait(stream, device.record(kComputeStream));
    NoGil no_gil;  // the host device may copy on this thread
    device.copy_async(dst->data(), src->data(), std::min(dst->bytes(), src->bytes()), stream);
    device.synchronize(device.record(stream));
  };
}

void TorchEngine::configure(const std::vector<UnitPlan>& plans, const EngineOptions& options) {
  require(plans.size() == units_.size(), "plan: it has ", plans.size(), " units, expected ",
          units_.size(), " (this model's); make a new plan");
  use_current_stream();
  synchronize();
  for (int i = 0; i < num_units(); ++i) settle(i);
  expectation_ = {};
  priority_order_ = options.priority_order;
  chunk_bytes_ = options.chunk_bytes;
  {
    NoGil no_gil;
    engine_.configure({}, options);  // gives the slots back
  }
  // What leaves the device goes first, so that there is room for what comes.
  const auto leaves = [](const UnitPlan& from, const UnitPlan& to) {
    return (from.parameters == Tier::kDevice && to.parameters == Tier::kHost) ||
           (from.optimizer_state == Tier::kDevice && to.optimizer_state == Tier::kHost);
  };
  const CopyAndWait copy = copier();
  std::exception_ptr failure;
  try {
    for (int i = 0; i < num_units(); ++i)
      if (leaves(units_[i]->plan(), plans[i])) units_[i]->rehome(plans[i], *handle_.store, copy);
    for (int i = 0; i < num_units(); ++i) units_[i]->rehome(plans[i], *handle_.store, copy);
  } catch (...) {
    failure = std::current_exception();
  }
  std::vector<UnitBlocks> blocks;
  for (const auto& unit : units_) blocks.push_back(unit->blocks());
  {
    NoGil no_gil;
    engine_.configure(std::move(blocks), options);
  }
  if (failure) std::rethrow_exception(failure);
}

void TorchEngine::leave(c10::Device device) {
  use_current_stream();
  synchronize();
  for (int i = 0; i < num_units(); ++i) settle(i, /*adopt=*/false);
  {
    NoGil no_gil;
    engine_.configure({}, EngineOptions{});
  }
  for (; !units_.empty(); units_.pop_back()) units_.back()->leave(device);
}

std::size_t TorchEngine::bytes_to_leave() const {
  std::size_t bytes = 0;
  for (const auto& unit : units_) {
    if (unit->plan().parameters == Tier::kHost) bytes += unit->param_bytes();
    if (unit->plan().optimizer_state == Tier::kHost)
      bytes += unit->state_bytes() + unit->gradient_bytes();
  }
  return bytes;
}

void TorchEngine::abandon() {
  use_current_stream();
  engine_.abandon();
}

// CUDA: the stream the user's kernels run on is looked up when a hook runs, never kept.
void TorchEngine::use_current_stream() {
  if (handle_.torch_device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(handle_.torch_device.type());
  handle_.device->set_compute_stream(
      reinterpret_cast<std::uintptr_t>(guard.getStream(handle_.torch_device).native_handle()));
}

void TorchEngine::point(int unit, const BlockPtr& block) { units_[unit]->point_parameters(block); }

void TorchEngine::acquire(int index, Direction direction) {
  if (offers_.at(index).in_place) withdraw(index);
  require_promise_kept();
  use_current_stream();
  land(/*all=*/false);
  TorchUnit& unit = *units_.at(index);
  if (users_[index]++ == 0) {
    if (unit.has_replaced()) settle(index);
    if (unit.gradients_leaving()) settle_leaving(index);  // the next backward adds to them
    versions_[index] = unit.versions();
  }
  BlockPtr block;
  try {
    NoGil no_gil;
    block = engine_.acquire(index, direction);
  } catch (...) {
    --users_[index];
    throw;
  }
  point(index, block);
}

void TorchEngine::release(int index) {
  if (users_.at(index) == 0) return;
  use_current_stream();
  const bool edited = --users_[index] == 0 && units_[index]->versions() != versions_[index];
  touched_[index] = touched_[index] || edited;
  if (edited && more_gradients_[index]) withdraw(index);  // it reads what comes home now
  BlockPtr block;
  {
    NoGil no_gil;
    block = engine_.release(index, edited);
  }
  point(index, block);
}

void TorchEngine::send(int index, bool final, bool at_step, bool averaged) {
  TorchUnit& unit = *units_[index];
  unit.land_held_back();
  if (more_gradients_[index]) {
    const bool goes_on = final && !averaged && offers_[index].open;
    if (goes_on && !unit.changed_while_leaving()) return send_rest(index);
    settle_leaving(index);
  }
  if (unit.plan().gradients != Tier::kHost || !unit.has_unsent_gradients()) return;
  if (unit.gradients_leaving()) settle_leaving(index);
  withdraw(index, /*ticking=*/!at_step);
  std::vector<CopySegment> segments = unit.collect_gradients(at_step, averaged);
  if (!unit.gradients_leaving()) return;
  leaving_.push_back(index);
  AheadWork ahead = final ? offer(index) : AheadWork();
  if (send_in_parts(index, segments, ahead)) return;
  NoGil no_gil;
  engine_.send_gradients(index, std::move(segments), std::move(ahead));
}

// Gradients that were added to on the host need no copy; what may run ahead still waits for the
// kernels that added.
void TorchEngine::offer_landed(int index) {
  TorchUnit& unit = *units_[index];
  if (offers_[index].open || unit.gradients_leaving() || unit.plan().gradients != Tier::kHost)
    return;
  AheadWork ahead = offer(index);
  if (!offers_[index].open) return;
  NoGil no_gil;
  engine_.send_gradients(index, {}, std::move(ahead));
}

void TorchEngine::send_gradients(int index, bool final, bool averaged) {
  use_current_stream();
  send(index, final, /*at_step=*/false, averaged);
  if (final) offer_landed(index);
  {
    NoGil no_gil;
    engine_.wait_gradients_below(kMaxUnitsLeaving + 1);
  }
  land(/*all=*/false);
}

void TorchEngine::finish_backward(bool averaged) {
  use_current_stream();
  for (int i = num_units() - 1; i >= 0; --i) {
    while (users_[i] > 0) release(i);
    send(i, /*final=*/true, /*at_step=*/false, averaged);
    offer_landed(i);
    land(/*all=*/false);
  }
}

// Gradients whose copies are over point at the host from here on.
void TorchEngine::land(bool all) {
  for (const int index : std::exchange(leaving_, {})) {
    TorchUnit& unit = *units_[index];
    if (!unit.gradients_leaving()) continue;
    if (all) {
      settle_leaving(index);
    } else if (!engine_.gradients_landed(index)) {
      leaving_.push_back(index);
    } else if (unit.land_gradients()) {
      send(index, /*final=*/false);
    }
  }
}

void TorchEngine::settle_gradients(int index) {
  settle_leaving(index);
  {
    NoGil no_gil;
    engine_.rest_ahead(index);  // what has run holds as long as the gradients keep their content
  }
  units_.at(index)->apply_gradient_factors();  // no update reads them: step() was not called yet
  gradients_touched_.at(index) = true;
}

void TorchEngine::settle_leaving(int index) {
  TorchUnit& unit = *units_.at(index);
  if (more_gradients_[index]) send_no_more(index);
  while (unit.gradients_leaving()) {
    {
      NoGil no_gil;
      engine_.wait_gradients(index);
    }
    if (!unit.land_gradients()) return;
    withdraw(index);
    std::vector<CopySegment> segments = unit.collect_gradients();
    if (!unit.gradients_leaving()) return;
    NoGil no_gil;
    engine_.send_gradients(index, std::move(segments));
  }
}

void TorchEngine::settle(int index, bool adopt) {
  if (engine_.num_units() == 0) return;  // between add_unit() and configure(): all is at home
  use_current_stream();
  settle_leaving(index);
  withdraw(index);
  BlockPtr block;
  {
    NoGil no_gil;
    block = engine_.settle(index);
  }
  units_[index]->apply_gradient_factors();
  gradients_touched_[index] = true;
  touched_[index] = true;
  if (adopt) require_promise_kept();
  if (users_[index] > 0) return;
  if (adopt) units_[index]->adopt_replaced();
  point(index, block);
}

void TorchEngine::synchronize() {
  land(/*all=*/true);
  NoGil no_gil;
  engine_.synchronize();
}

std::vector<std::pair<int, at::Tensor>> TorchEngine::gradient_parts() const {
  std::vector<std::pair<int, at::Tensor>> parts;
  for (int u = 0; u < num_units(); ++u) {
    for (const TorchParameter& parameter : units_[u]->parameters()) {
      const at::Tensor& gradient = parameter.value.tensor().grad();
      if (gradient.defined() && gradient.has_storage() &&
          gradient.storage().nbytes() > gradient.nbytes())
        parts.emplace_back(u, gradient);
    }
  }
  return parts;
}

}  // namespace autohete
