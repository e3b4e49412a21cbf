#include "csrc/memory/unit_layout.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace autohete {
namespace {

// The places that the streams of one parameter's update have so far.
class Streams {
 public:
  explicit Streams(bool large) : large_(large) {}

  // `at`, or the next offset from which the stream, which begins `behind` bytes further, is apart
  // from all of them, and its spare too.
  std::size_t add(std::size_t at, std::size_t behind = 0) {
    if (!large_) return at;
    std::vector<std::size_t> others = places_;
    for (std::size_t& other : others) other -= behind;
    at = place_apart(at, kBlockAlignment, others);
    note(at + behind);
    return at;
  }
  // A spare, and what has one here.
  void note(std::size_t place) {
    for (const std::size_t near : {place, place + kSpareLead, place - kSpareLead})
      places_.push_back(near);
  }

 private:
  const bool large_;
  std::vector<std::size_t> places_;
};

class PartOfBlock final : public Block {
 public:
  PartOfBlock(BlockPtr whole, std::size_t lead)
      : Block(whole->data() + lead, whole->bytes() - lead, whole->tier()),
        whole_(std::move(whole)) {}

 private:
  const BlockPtr whole_;
};

}  // namespace

UnitLayout lay_out(const std::vector<StreamSizes>& parameters) {
  UnitLayout layout;
  for (const StreamSizes& sizes : parameters) {
    // Then every block is one that begins with a large page.
    const bool large =
        sizes.has_gradient && std::min(sizes.bytes, sizes.array_bytes) >= kLargeStreamBytes;
    if (large) layout.spare_lead = kSpareLead;
    Streams streams(large);
    StreamOffsets offsets;
    offsets.param = layout.param_bytes;
    layout.param_bytes += align_up(sizes.bytes);
    streams.note(offsets.param + sizes.part_begin);
    for (int array = kExpAvg; array < kStateArrays; ++array) {
      if (!sizes.has_array[array]) continue;
      offsets.state[array] = streams.add(layout.state_bytes);
      layout.state_bytes = offsets.state[array] + align_up(sizes.array_bytes);
    }
    if (sizes.has_gradient) {
      offsets.gradient = streams.add(layout.gradient_bytes, sizes.part_begin);
      layout.gradient_gaps += offsets.gradient - layout.gradient_bytes;
      layout.gradient_bytes = offsets.gradient + align_up(sizes.bytes);
    }
    layout.offsets.push_back(offsets);
  }
  return layout;
}

BlockPtr begin_behind(BlockPtr whole, std::size_t lead) {
  if (lead == 0) return whole;
  return std::make_shared<PartOfBlock>(std::move(whole), lead);
}

}  // namespace autohete
