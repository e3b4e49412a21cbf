// The engine with tensors at step(): state, param groups, and the updates that start there.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/bindings/torch_engine.h"
#include "csrc/kernels/kernels.h"

namespace autohete {

using NoGil = pybind11::gil_scoped_release;

std::size_t TorchEngine::count_parameters(const std::vector<AdamSpan>& spans) {
  std::size_t count = 0;
  for (const AdamSpan& span : spans) count += span.numel;
  return count;
}

void TorchEngine::update_now(const std::vector<AdamSpan>& spans) {
  run_update(spans, /*by_products=*/false);
}

// On the CPU lane. Other units' updates may run inside it, on the same workers.
UpdateStats TorchEngine::run_update(const std::vector<AdamSpan>& spans, bool by_products,
                                    const std::uint64_t* positions) {
  const auto between = [this](std::size_t num_parameters) { engine_.give_way(num_parameters); };
  return adamw_in_pieces(spans.data(), spans.size(), workers_, by_products, between, positions);
}

std::vector<std::pair<int, int>> TorchEngine::take_relaid() {
  std::vector<std::pair<int, int>> all;
  for (int u = 0; u < num_units(); ++u)
    for (const std::size_t i : units_[u]->take_relaid()) all.emplace_back(u, static_cast<int>(i));
  return all;
}

std::vector<std::pair<int, int>> TorchEngine::replaced_state() const {
  std::vector<std::pair<int, int>> all;
  for (int u = 0; u < num_units(); ++u) {
    const std::vector<TorchParameter>& parameters = units_[u]->parameters();
    for (int i = 0; i < static_cast<int>(parameters.size()); ++i)
      if (parameters[i].has_replaced_state()) all.emplace_back(u, i);
  }
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
  for (int k = 0; k < num_units(); ++k) {
    const int i = priority_order_ ? k : num_units() - 1 - k;  // or as gradients came
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
  adamw(spans.data(), spans.size(), workers_, cpu_level(), /*by_products=*/false);
}

}  // namespace autohete
