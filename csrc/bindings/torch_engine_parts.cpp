// A unit's gradients that leave in parts, and the update ahead that follows them. See ADR 8.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>

#include "csrc/bindings/torch_engine.h"
#include "csrc/kernels/tile.h"

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

const void* on(const void* pointer, std::size_t items, DType dtype) {
  return pointer ? static_cast<const std::byte*>(pointer) + items * item_bytes(dtype) : nullptr;
}
void* on(void* pointer, std::size_t items, DType dtype) {
  return pointer ? static_cast<std::byte*>(pointer) + items * item_bytes(dtype) : nullptr;
}

// Items [begin, end) of a tensor's span.
AdamSpan piece_of(const AdamSpan& whole, std::size_t begin, std::size_t end) {
  AdamSpan piece = whole;
  piece.numel = end - begin;
  piece.offset += begin;
  piece.grad = on(whole.grad, begin, whole.grad_dtype);
  piece.param_in += begin;
  piece.param_out += begin;
  piece.half_in = on(whole.half_in, begin, whole.half_dtype);
  piece.half_out = on(whole.half_out, begin, whole.half_dtype);
  for (const void* AdamSpan::* state :
       {&AdamSpan::exp_avg_in, &AdamSpan::exp_avg_sq_in, &AdamSpan::max_exp_avg_sq_in})
    piece.*state = on(whole.*state, begin, whole.state_dtype);
  for (void* AdamSpan::* state :
       {&AdamSpan::exp_avg_out, &AdamSpan::exp_avg_sq_out, &AdamSpan::max_exp_avg_sq_out})
    piece.*state = on(whole.*state, begin, whole.state_dtype);
  return piece;
}

// Gradients that are copied together, and what is updated when they are there.
struct Part {
  std::vector<CopySegment> segments;
  PlacedSpans update;
  std::size_t bytes = 0;
};

// Whole tiles, about part_bytes of gradients each. `segments` are those of spans; a span without
// one has its gradient on the host.
std::vector<Part> cut_into_parts(const PlacedSpans& whole, std::vector<CopySegment> segments,
                                 std::size_t part_bytes) {
  std::vector<Part> parts(1);
  for (std::size_t s = 0; s < whole.spans.size(); ++s) {
    const AdamSpan& span = whole.spans[s];
    const std::size_t size = item_bytes(span.grad_dtype);
    const auto segment = std::find_if(segments.begin(), segments.end(),
                                      [&](const CopySegment& c) { return c.dst == span.grad; });
    for (std::size_t begin = 0, end; begin < span.numel; begin = end) {
      const std::size_t taken = parts.back().bytes;
      if (taken > 0 && taken + kTile * size > part_bytes) parts.emplace_back();
      Part& part = parts.back();
      const std::size_t room = (part_bytes - part.bytes) / size / kTile * kTile;
      end = std::min(span.numel, begin + std::max(room, kTile));
      part.update.spans.push_back(piece_of(span, begin, end));
      part.update.positions.push_back(whole.positions[s] + begin);
      if (segment == segments.end()) continue;
      part.segments.push_back({static_cast<std::byte*>(segment->dst) + begin * size,
                               static_cast<const std::byte*>(segment->src) + begin * size,
                               (end - begin) * size});
      part.bytes += (end - begin) * size;
    }
    if (segment != segments.end()) segments.erase(segment);
  }
  // What is left is of no span.
  parts.back().segments.insert(parts.back().segments.end(), segments.begin(), segments.end());
  return parts;
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

// False, and nothing is sent, where the unit's gradients are too few or nobody will wait for them.
// All parts were on the device before the first leaves, so nothing can come in between.
bool TorchEngine::send_in_parts(int index, std::vector<CopySegment>& segments, AheadWork& ahead) {
  std::size_t bytes = 0;
  for (const CopySegment& segment : segments) bytes += segment.bytes;
  const std::size_t part_bytes = std::max(chunk_bytes_, bytes / kMaxParts + 1);
  const Offer& offer = offers_[index];
  if (index >= kUnitsAtTheTurn || bytes < 2 * part_bytes || !ahead.update || offer.in_place ||
      share_)
    return false;
  std::vector<Part> parts = cut_into_parts({offer.spans, units_[index]->hash_positions()},
                                           std::move(segments), part_bytes);
  NoGil no_gil;
  for (Part& part : parts) {
    const bool more = &part != &parts.back();
    AheadWork work;
    if (!more) work.measure = std::move(ahead.measure);
    work.num_parameters = count_parameters(part.update.spans);
    work.update = part_of_update(std::move(part.update), offer.hash);
    engine_.send_gradients(index, std::move(part.segments), std::move(work), more);
  }
  return true;
}

void TorchEngine::send_no_more(int index) {
  more_gradients_[index] = false;
  NoGil no_gil;
  engine_.send_gradients(index, {});
}

}  // namespace autohete
