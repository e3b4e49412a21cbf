// What the engine with tensors does ahead of step(), and whether it holds. See ADR 8.
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/bindings/torch_engine.h"
#include "csrc/kernels/kernels.h"

namespace autohete {

using NoGil = pybind11::gil_scoped_release;

namespace {

// As if the gradient had been multiplied in place first.
at::Tensor norm_of(const at::Tensor& gradient, float scale) {
  return at::linalg_vector_norm(scale == 1.0F ? gradient : at::mul(gradient, scale), 2);
}

}  // namespace

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
  if (engine_.state(index).parameters_final()) unit.join_state();
  if (expectation_.update && !unit.has_aliases())
    offer.spans = expectation_.in_place ? unit.spans_ahead_in_place(expectation_.hypers)
                                        : unit.spans_ahead(expectation_.hypers);
  if (!offer.spans.empty()) {
    offer.in_place = expectation_.in_place;
    if (touched_[index]) unit.take_edits(copier());
    touched_[index] = false;
    work.num_parameters = count_parameters(offer.spans);
    offer.hash = std::make_shared<ContentHash>();
    work.update = part_of_update({offer.spans, unit.hash_positions()}, offer.hash);
  }
  offer_norms(index, work);
  offer.open = work.update || work.measure;
  if (!offer.open) return work;
  gradients_touched_[index] = unit.note_offered();
  return work;
}

void TorchEngine::offer_norms(int index, AheadWork& work) {
  const TorchUnit& unit = *units_[index];
  Offer& offer = offers_[index];
  if (!expectation_.measure || !unit.has_gradients()) return;
  offer.norms = std::make_shared<std::vector<at::Tensor>>();
  offer.norm_scale = expectation_.norm_scale;
  work.measure = [gradients = unit.host_gradients(), norms = offer.norms,
                  scale = offer.norm_scale] {
    for (const at::Tensor& gradient : gradients)
      norms->push_back(gradient.defined() ? norm_of(gradient, scale) : at::Tensor());
  };
}

// An interrupt while it waits leaves the offer open: whoever comes next withdraws it.
void TorchEngine::withdraw(int index, bool ticking) {
  bool started = false;
  if (offers_.at(index).open) {
    NoGil no_gil;
    started = engine_.withdraw(index, ticking);
  }
  const Offer offer = std::exchange(offers_[index], {});
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

std::optional<int> TorchEngine::place_of(int index, const at::Tensor& gradient) const {
  const std::vector<TorchParameter>& parameters = units_.at(index)->parameters();
  const auto has_it = [&](const TorchParameter& parameter) {
    return parameter.value.tensor().grad().is_same(gradient);
  };
  const auto found = std::find_if(parameters.begin(), parameters.end(), has_it);
  if (found == parameters.end()) return std::nullopt;
  return static_cast<int>(found - parameters.begin());
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
    if (!kept) started = engine_.withdraw(index, /*ticking=*/false);
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

ContentHash TorchEngine::hash_of_gradients(const std::vector<AdamSpan>& spans) {
  std::vector<GradSpan> gradients;
  for (const AdamSpan& span : spans) gradients.push_back({span.grad, span.grad_dtype, span.numel});
  return content_hash(gradients.data(), gradients.size(), workers_);
}

}  // namespace autohete
