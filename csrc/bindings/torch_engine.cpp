#include "csrc/bindings/torch_engine.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/kernels/kernels.h"

namespace autohete {

using NoGil = pybind11::gil_scoped_release;

namespace {

std::size_t count_parameters(const std::vector<AdamSpan>& spans) {
  std::size_t count = 0;
  for (const AdamSpan& span : spans) count += span.numel;
  return count;
}

// As if the gradient had been multiplied in place first.
at::Tensor norm_of(const at::Tensor& gradient, float scale) {
  return at::linalg_vector_norm(scale == 1.0F ? gradient : at::mul(gradient, scale), 2);
}

}  // namespace

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
  return num_units() - 1;
}

CopyAndWait TorchEngine::copier() {
  return [this](const BlockPtr& dst, const BlockPtr& src) {
    Device& device = *handle_.device;
    const bool to_device = dst->tier() == Tier::kDevice;
    const StreamId stream = copy_streams_[to_device ? 0 : 1];
    use_current_stream();
    device.wait(stream, device.record(kComputeStream));
    device.copy_async(dst->data(), src->data(), std::min(dst->bytes(), src->bytes()), stream);
    const Event done = device.record(stream);
    NoGil no_gil;
    device.synchronize(done);
  };
}

void TorchEngine::configure(const std::vector<UnitPlan>& plans, const EngineOptions& options) {
  require(plans.size() == units_.size(), "plan: it has ", plans.size(), " units, expected ",
          units_.size(), " (this model's); make a new plan");
  use_current_stream();
  synchronize();
  for (int i = 0; i < num_units(); ++i) settle(i);
  expectation_ = {};
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

int TorchEngine::reserve_ahead(std::size_t max_bytes) {
  int ready = 0;
  for (int i = num_units() - 1; i >= 0; --i, ++ready) {
    if (bytes_reserved_ahead() + units_[i]->bytes_of_spare() > max_bytes) break;
    if (!units_[i]->reserve_spare(*handle_.store)) break;
  }
  return ready;
}

std::size_t TorchEngine::bytes_reserved_ahead() const {
  std::size_t bytes = 0;
  for (const auto& unit : units_) bytes += unit->spare_bytes();
  return bytes;
}

void TorchEngine::expect_step(Expectation expectation) { expectation_ = std::move(expectation); }

// What may be done with the unit's gradients before step(), which are final now. Edits the user
// made to the parameters until now are part of what the update reads.
AheadWork TorchEngine::offer(int index) {
  AheadWork work;
  TorchUnit& unit = *units_[index];
  Offer& offer = offers_[index];
  if ((!expectation_.update && !expectation_.measure) || unit.has_replaced()) return work;
  if (unit.has_held_gradients()) return work;
  if (unit.plan().optimizer_state != Tier::kHost) return work;
  if (expectation_.update && !unit.has_aliases())
    offer.spans = expectation_.in_place ? unit.spans_ahead_in_place(expectation_.hypers)
                                        : unit.spans_ahead(expectation_.hypers);
  if (!offer.spans.empty()) {
    offer.in_place = expectation_.in_place;
    if (touched_[index]) unit.take_edits(copier());
    touched_[index] = false;
    work.num_parameters = count_parameters(offer.spans);
    offer.hash = std::make_shared<ContentHash>();
    work.update = [this, spans = offer.spans, hash = offer.hash] {
      *hash = adamw(spans.data(), spans.size(), workers_).grad_hash;
    };
  }
  if (expectation_.measure && unit.has_gradients()) {
    offer.norms = std::make_shared<std::vector<at::Tensor>>();
    offer.norm_scale = expectation_.norm_scale;
    work.measure = [gradients = unit.host_gradients(), norms = offer.norms,
                    scale = offer.norm_scale] {
      for (const at::Tensor& gradient : gradients)
        norms->push_back(gradient.defined() ? norm_of(gradient, scale) : at::Tensor());
    };
  }
  offer.open = work.update || work.measure;
  if (!offer.open) return work;
  gradients_touched_[index] = false;
  unit.note_offered();
  return work;
}

void TorchEngine::withdraw(int index) {
  const Offer offer = std::exchange(offers_.at(index), {});
  if (!offer.open) return;
  bool started = false;
  {
    NoGil no_gil;
    started = engine_.withdraw(index);
  }
  if (started && offer.in_place && broken_promise_.empty()) {
    broken_promise_ = broken_promise(index, "parameters, state or gradients were used or changed");
  }
}

std::string TorchEngine::broken_promise(int index, const char* how) const {
  return concat(
      "early_updates: it is \"in_place\", and ", how, " between backward() and step() when unit ",
      units_[index]->name(),
      " had been updated already, expected step() to follow the last of the ",
      "gradient_accumulation_steps backward passes directly; values of this step are lost: load a "
      "checkpoint, and wrap with early_updates=True, which allows anything there");
}

void TorchEngine::require_promise_kept() const {
  if (!broken_promise_.empty()) throw std::runtime_error(broken_promise_);
}

void TorchEngine::withdraw_ahead() {
  expectation_ = {};
  for (int i = 0; i < num_units(); ++i) {
    withdraw(i);
    if (units_[i]->has_gradient_factors()) settle(i);  // the last update may still be reading
  }
}

std::optional<at::Tensor> TorchEngine::gradient_norm(int index, int i) {
  const float factor = units_.at(index)->parameters().at(i).gradient_factor;
  return factor == offers_[index].norm_scale ? measured_norm(index, i) : std::nullopt;
}

bool TorchEngine::gradient_is_finite(int index, int i) {
  const std::optional<at::Tensor> norm = measured_norm(index, i);
  return norm && std::isfinite(norm->item<double>());
}

std::optional<at::Tensor> TorchEngine::measured_norm(int index, int i) {
  TorchUnit& unit = *units_.at(index);
  const Offer& offer = offers_[index];
  if (!offer.open || !offer.norms || gradients_touched_[index]) return std::nullopt;
  bool measured;
  {
    NoGil no_gil;
    measured = engine_.wait_measured(index);
  }
  land(/*all=*/false);
  if (!measured || !unit.offered_unchanged() || !offer.norms->at(i).defined()) return std::nullopt;
  return offer.norms->at(i);
}

bool TorchEngine::scale_gradient(int index, int i, float factor) {
  TorchUnit& unit = *units_.at(index);
  TorchParameter& parameter = unit.parameters().at(i);
  if (!offers_[index].open || unit.gradients_leaving() || !unit.offered_unchanged() ||
      parameter.gradient_factor != 1.0F ||
      parameter.value.tensor().grad().scalar_type() != at::kFloat)
    return false;
  parameter.gradient_factor = factor;
  return true;
}

// At step(): what ran ahead holds when it did this very work on what is there now. Where somebody
// may have written to the gradients, their content tells, on the CPU lane.
bool TorchEngine::commit_ahead(int index, const std::vector<AdamSpan>& spans) {
  const Offer offer = std::exchange(offers_[index], {});
  TorchUnit& unit = *units_[index];
  if (!offer.open) return false;
  const bool suspect =
      gradients_touched_[index] || !unit.offered_unchanged() || !unit.offered_alone();
  if (suspect && offer.in_place) {
    NoGil no_gil;  // there is no other way than to look
    handle_.device->synchronize(handle_.device->record(kComputeStream));
  }
  // CUDA kernels may be pending.
  const bool readable = !suspect || offer.in_place || handle_.torch_device.is_cpu();
  const bool same = !spans.empty() && readable && !unit.has_aliases() && unit.offered_there() &&
                    std::equal(spans.begin(), spans.end(), offer.spans.begin(), offer.spans.end(),
                               [](const AdamSpan& a, const AdamSpan& b) {
                                 return a.numel == b.numel && a.grad == b.grad &&
                                        a.param_in == b.param_in && a.half_in == b.half_in &&
                                        a.exp_avg_in == b.exp_avg_in && a.step == b.step &&
                                        a.hyper == b.hyper;
                               });
  bool kept = false, started = false;
  {
    NoGil no_gil;
    kept = same && engine_.keep_ahead(index);
    if (!kept) started = engine_.withdraw(index);
  }
  if (started && offer.in_place) {
    broken_promise_ = broken_promise(index, "gradients, learning rates or other numbers changed");
    require_promise_kept();
  }
  if (!kept) return false;
  if (!offer.in_place) unit.swap_spare();
  share_later(index);
  // Not the norms: they may have Python objects, which the CPU lane must not be the last to hold.
  auto again = [this, index, spans = offer.spans, hash = offer.hash, in_place = offer.in_place,
                suspect] {
    if (suspect && hash_of_gradients(spans) == *hash) return;
    if (in_place) throw std::runtime_error(broken_promise(index, "gradients changed"));
    ++updates_redone_;
    update_now(spans);
  };
  NoGil no_gil;
  engine_.commit_ahead(index, unit.blocks().params_host, std::move(again), suspect);
  return true;
}

void TorchEngine::update_now(const std::vector<AdamSpan>& spans) {
  adamw(spans.data(), spans.size(), workers_, cpu_level(), /*by_products=*/false);
}

ContentHash TorchEngine::hash_of_gradients(const std::vector<AdamSpan>& spans) {
  std::vector<GradSpan> gradients;
  for (const AdamSpan& span : spans) gradients.push_back({span.grad, span.grad_dtype, span.numel});
  return content_hash(gradients.data(), gradients.size(), workers_);
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
  BlockPtr block;
  {
    NoGil no_gil;
    block = engine_.release(index, edited);
  }
  point(index, block);
}

void TorchEngine::send(int index, bool final, bool at_step) {
  TorchUnit& unit = *units_[index];
  unit.land_held_back();
  if (unit.plan().gradients != Tier::kHost || !unit.has_unsent_gradients()) return;
  if (unit.gradients_leaving()) settle_leaving(index);
  withdraw(index);
  std::vector<CopySegment> segments = unit.collect_gradients(at_step);
  if (!unit.gradients_leaving()) return;
  leaving_.push_back(index);
  AheadWork ahead = final ? offer(index) : AheadWork();
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

void TorchEngine::send_gradients(int index, bool final) {
  use_current_stream();
  send(index, final);
  if (final) offer_landed(index);
  {
    NoGil no_gil;
    engine_.wait_gradients_below(kMaxUnitsLeaving + 1);
  }
  land(/*all=*/false);
}

void TorchEngine::finish_backward() {
  use_current_stream();
  for (int i = num_units() - 1; i >= 0; --i) {
    while (users_[i] > 0) release(i);
    send(i, /*final=*/true);
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

std::vector<std::pair<int, int>> TorchEngine::take_relaid() {
  std::vector<std::pair<int, int>> all;
  for (int u = 0; u < num_units(); ++u)
    for (const std::size_t i : units_[u]->take_relaid()) all.emplace_back(u, static_cast<int>(i));
  return all;
}

std::vector<std::pair<int, int>> TorchEngine::missing_state() {
  std::vector<std::pair<int, int>> missing;
  for (int u = 0; u < num_units(); ++u) {
    const std::vector<TorchParameter>& parameters = units_[u]->parameters();
    for (int i = 0; i < static_cast<int>(parameters.size()); ++i) {
      const TorchParameter& parameter = parameters[i];
      if (parameter.group >= 0 && !parameter.step.defined() &&
          parameter.value.tensor().grad().defined())
        missing.emplace_back(u, i);
    }
  }
  return missing;
}

void TorchEngine::set_group(int unit, int index, int group) {
  TorchParameter& parameter = units_.at(unit)->parameters().at(index);
  require(group < 0 || parameter.has_room, "optimizer: a parameter of unit ", units_[unit]->name(),
          " joined the optimizer after wrapping; unwrap() first");
  parameter.group = group;
}

// On CUDA kernels of the user's may still be reading or writing a touched unit's host memory, so
// its update starts after them: they are in front of this event.
void TorchEngine::commit(const std::vector<AdamHyper>& hypers) {
  require_promise_kept();
  use_current_stream();
  // Exchanged gradients go one unit at a time: what one sends may be what another one lands.
  const bool exchanged = std::any_of(units_.begin(), units_.end(),
                                     [](const auto& unit) { return unit->gradients_exchanged(); });
  land(/*all=*/exchanged);
  const bool cuda = !handle_.torch_device.is_cpu();
  for (int i = 0; i < num_units(); ++i) {
    TorchUnit& unit = *units_[i];
    while (users_[i] > 0) release(i);
    const bool host = unit.plan().optimizer_state == Tier::kHost;
    const bool replaced = unit.has_replaced();
    if (!host) {
      unit.adopt_replaced();
      continue;
    }
    const bool kernels_pending = cuda && (replaced || touched_[i] || gradients_touched_[i]);
    if (replaced || touched_[i]) {
      settle(i);
      unit.take_edits(copier());
      touched_[i] = false;
    }
    send(i, /*final=*/false, /*at_step=*/true);
    const bool held = unit.has_held_gradients();  // and may be written to when we have returned
    if (exchanged || held) settle_leaving(i);
    std::vector<AdamSpan> spans = unit.make_spans(hypers);
    const bool ahead = commit_ahead(i, spans);
    gradients_touched_[i] = false;
    if (ahead) continue;
    if (!share_later(i) && spans.empty()) continue;
    NoGil no_gil;
    if (kernels_pending && !unit.gradients_leaving()) engine_.send_gradients(i, {});
    const std::size_t num_parameters = count_parameters(spans);
    auto update = [this, spans = std::move(spans)] { update_now(spans); };
    engine_.commit(i, std::move(update), num_parameters);
  }
  expectation_ = {};
  if (!cuda) update_on_device(hypers);  // on CUDA torch's own rule does it, after this
  NoGil no_gil;
  engine_.begin_iteration();
  if (barrier_) engine_.wait_idle();
}

// The other ranks' parts of the unit follow its update, where there are other ranks.
bool TorchEngine::share_later(int index) {
  if (!share_) return false;
  std::vector<at::Tensor> parameters = units_[index]->shared_parameters();
  if (parameters.empty()) return false;
  auto share = [this, index, parameters = std::move(parameters)] { share_(index, parameters); };
  NoGil no_gil;
  engine_.share_after_update(index, std::move(share));
  return true;
}

// The host device's own update: on the calling thread and the workers, as device compute would be.
void TorchEngine::update_on_device(const std::vector<AdamHyper>& hypers) {
  std::vector<AdamSpan> spans;
  for (const auto& unit : units_) {
    if (unit->plan().optimizer_state != Tier::kDevice) continue;
    std::vector<AdamSpan> more = unit->make_spans(hypers);
    spans.insert(spans.end(), more.begin(), more.end());
  }
  if (spans.empty()) return;
  NoGil no_gil;
  update_now(spans);
}

}  // namespace autohete
