// A unit's gradients that leave in parts, and the update ahead that follows them. See ADR 8.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>

#include "csrc/bindings/torch_engine.h"

namespace autohete {

using NoGil = pybind11::gil_scoped_release;

namespace {

// The update that commit() would make of the same gradients.
bool is_same(const AdamSpan& a, const AdamSpan& b) {
  return a.grad == b.grad && a.numel == b.numel && a.param_in == b.param_in &&
         a.param_out == b.param_out && a.half_in == b.half_in && a.exp_avg_in == b.exp_avg_in &&
         a.exp_avg_out == b.exp_avg_out && a.step == b.step && a.hyper == b.hyper;
}

bool has(const std::vector<AdamSpan>& spans, const AdamSpan& wanted) {
  return std::any_of(spans.begin(), spans.end(),
                     [&](const AdamSpan& span) { return is_same(span, wanted); });
}

}  // namespace

// The hashes of parts add up to that of the unit.
std::function<void()> TorchEngine::part_of_update(PlacedSpans part,
                                                  std::shared_ptr<ContentHash> hash) {
  return [this, part = std::move(part), hash = std::move(hash)] {
    *hash += run_update(part.spans, /*by_products=*/true, part.positions.data()).grad_hash;
  };
}

bool TorchEngine::send_first_gradients(int index) {
  TorchUnit& unit = *units_.at(index);
  if (!expectation_.update || expectation_.in_place || more_gradients_[index] ||
      offers_[index].open || share_ || touched_[index])
    return false;
  if (unit.plan().gradients != Tier::kHost || unit.plan().optimizer_state != Tier::kHost)
    return false;
  unit.land_held_back();
  // What is on the host may be about to be added to.
  if (unit.gradients_leaving() || unit.has_landed_gradients() || unit.has_replaced()) return false;
  unit.join_state();
  if (unit.spare_bytes() == 0 || unit.has_aliases_beside_gradients()) return false;
  use_current_stream();
  std::vector<CopySegment> segments = unit.collect_gradients();
  if (!unit.gradients_leaving()) return false;
  leaving_.push_back(index);
  more_gradients_[index] = true;
  AheadWork ahead = offer_first(index);
  NoGil no_gil;
  engine_.send_gradients(index, std::move(segments), std::move(ahead), /*more=*/true);
  return true;
}

AheadWork TorchEngine::offer_first(int index) {
  AheadWork work;
  TorchUnit& unit = *units_[index];
  PlacedSpans part = unit.leaving_spans_ahead(expectation_.hypers);
  if (part.spans.empty()) return work;
  Offer& offer = offers_[index];
  offer.open = true;
  offer.first = part.spans;
  offer.hash = std::make_shared<ContentHash>();
  gradients_touched_[index] = unit.note_offered(/*leaving=*/true);
  work.num_parameters = count_parameters(part.spans);
  work.update = part_of_update(std::move(part), offer.hash);
  return work;
}

// The gradients that came after the first.
void TorchEngine::send_rest(int index) {
  std::vector<CopySegment> segments = units_[index]->collect_gradients();
  AheadWork ahead = offer_rest(index);
  more_gradients_[index] = false;
  NoGil no_gil;
  engine_.send_gradients(index, std::move(segments), std::move(ahead));
}

// Whatever has become of the first ones' part of the update, all of it is one, or none is.
AheadWork TorchEngine::offer_rest(int index) {
  AheadWork work;
  TorchUnit& unit = *units_[index];
  Offer& offer = offers_[index];
  const bool usable = offer.open && !unit.has_replaced() && !unit.has_held_gradients() &&
                      !unit.has_aliases() && !touched_[index];
  if (usable) offer.spans = unit.spans_ahead(expectation_.hypers);
  PlacedSpans rest;
  const std::vector<std::uint64_t> positions = unit.hash_positions();
  for (std::size_t i = 0; i < offer.spans.size(); ++i) {
    if (has(offer.first, offer.spans[i])) continue;
    rest.spans.push_back(offer.spans[i]);
    rest.positions.push_back(positions[i]);
  }
  if (!usable || rest.spans.size() + offer.first.size() != offer.spans.size()) {
    withdraw(index);
    return work;
  }
  offer_norms(index, work);
  if (unit.note_offered()) gradients_touched_[index] = true;
  if (rest.spans.empty()) return work;
  work.num_parameters = count_parameters(rest.spans);
  work.update = part_of_update(std::move(rest), offer.hash);
  return work;
}

void TorchEngine::send_no_more(int index) {
  more_gradients_[index] = false;
  NoGil no_gil;
  engine_.send_gradients(index, {});
}

}  // namespace autohete
