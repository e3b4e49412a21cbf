// One traversal for every update rule: a tile block by block, each block a chain of plain loops.
//
// A Rule is a struct with
//   Span          its UpdateSpan, with `hyper`
//   Coefficients  what the loop needs of hyper and step, made once per span
//   same_coefficients(span, other)  whether they are equal; pow() costs as much as 100 values
//   kStates       how many state tensors it has at most
//   states(span)  where they lie
//   apply(coefficients, block, n)   the arithmetic over one block, an AH_INLINE loop
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "csrc/kernels/by_products.h"
#include "csrc/kernels/half.h"
#include "csrc/kernels/levels.h"
#include "csrc/kernels/mix.h"
#include "csrc/kernels/stream_copy.h"
#include "csrc/kernels/update.h"

namespace autohete {

struct StateStream {
  const void* in = nullptr;  // null: this rule does without here
  void* out = nullptr;
};

// Where one block's values lie, all fp32.
template <std::size_t states>
struct UpdateBlock {
  const float *grad, *param;
  std::array<const float*, states> state;
  float* param_out;
  std::array<float*, states> state_out;
};

// A piece of one span, and what was seen in it.
template <typename Rule>
struct UpdateTile {
  const typename Rule::Span* span;
  const typename Rule::Coefficients* coefficients;
  std::uint64_t position;  // of the span in what is hashed
  std::size_t begin, end;
  StreamCopy stream;  // null: all stores go through the caches
  Wanted by_products;
  double grad_sq_sum = 0;
  ContentHash grad_hash{};
  std::size_t edited = 0;
  const UpdateTile* next = nullptr;  // the one that its thread will probably walk next

  std::size_t num_blocks() const { return (end - begin + kBlock - 1) / kBlock; }
};

// Whether every half value is still its master rounded. Nothing is written: a block without edits
// costs one comparison a value.
template <typename Half>
AH_INLINE bool all_rounded(const std::uint16_t* half, const float* master, std::size_t n) {
  std::uint32_t differences = 0;
  for (std::size_t i = 0; i < n; ++i) {
    differences |= Half::round(master[i]) ^ half[i];
  }
  return differences == 0;
}

// The master where the half copy is still its rounding, else the half copy. Returns how many
// differ.
template <typename Half>
AH_INLINE std::size_t take_edits(const std::uint16_t* half, const float* master, float* out,
                                 std::size_t n) {
  std::uint32_t edited = 0;
  AH_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const bool same = Half::round(master[i]) == half[i];
    out[i] = same ? master[i] : Half::widen(half[i]);
    edited += same ? 0u : 1u;
  }
  return edited;
}

template <typename Half>
AH_INLINE const float* param_or_edits(const std::uint16_t* half, const float* master,
                                      float* scratch, std::size_t n, std::size_t& edited) {
  if (__builtin_expect(all_rounded<Half>(half, master, n), 1)) return master;
  edited += take_edits<Half>(half, master, scratch, n);
  return scratch;
}

AH_INLINE const float* current_param(const UpdateSpan& span, std::size_t at, std::size_t n,
                                     float* scratch, std::size_t& edited) {
  const float* master = span.param_in + at;
  if (span.half_in == nullptr) return master;
  const auto* half = static_cast<const std::uint16_t*>(span.half_in) + at;
  return span.half_dtype == DType::kBFloat16
             ? param_or_edits<Bf16>(half, master, scratch, n, edited)
             : param_or_edits<Fp16>(half, master, scratch, n, edited);
}

// A block at a time is too short a run for the hardware to keep memory busy across five streams and
// more; asking for a later block does (measured: 10 to 15 %; 2 to 8 blocks ahead are alike on
// Intel, 8 and 16 take 10 % less than 4 on Zen 5).
constexpr std::size_t kBlocksAhead = 8;

// The block's cache lines, and those behind the end of a last one, which is no error.
AH_INLINE void prefetch(const void* stream, std::size_t item, std::size_t at) {
  const auto* begin = static_cast<const char*>(stream) + at * item;
  for (std::size_t byte = 0; byte < kBlock * item; byte += 64) __builtin_prefetch(begin + byte, 1);
}

template <std::size_t states>
AH_INLINE void prefetch(const UpdateSpan& span, const std::array<StateStream, states>& streams,
                        std::size_t at) {
  prefetch(span.param_in, sizeof(float), at);
  for (const StateStream& stream : streams) {
    if (stream.in != nullptr) prefetch(stream.in, item_bytes(span.state_dtype), at);
  }
  if (span.half_in != nullptr) prefetch(span.half_in, item_bytes(span.half_dtype), at);
  prefetch(span.grad, item_bytes(span.grad_dtype), at);
}

// What lies `ahead` blocks behind the beginning of `tile`, when that is in the next one. Without it
// nobody asks for a tensor's first blocks (measured: 13 to 21 % of 1000 tensors of 3000 items).
template <typename Rule>
AH_INLINE void prefetch_in_next(const UpdateTile<Rule>& tile, std::size_t ahead) {
  ahead -= tile.num_blocks();
  const UpdateTile<Rule>* next = tile.next;
  if (next == nullptr || ahead >= next->num_blocks()) return;
  prefetch(*next->span, Rule::states(*next->span), next->begin + ahead * kBlock);
}

// bf16 rounded up or down at random. What is too large for bf16 is not rounded up to infinity, and
// NaN is made the quiet one, as Bf16 does.
AH_INLINE void narrow_at_random(const float* in, std::uint16_t* out, std::size_t n,
                                const RandomKey& key, std::uint32_t counter, unsigned shift) {
  AH_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const auto bits = __builtin_bit_cast(std::uint32_t, in[i]);
    const auto magnitude = static_cast<std::int32_t>(bits & 0x7fffffffu);
    const std::uint32_t noise =
        (key.at(counter + static_cast<std::uint32_t>(i)) >> shift) & 0xffffu;
    const std::uint32_t rounded = bits + (magnitude < 0x7f7f0000 ? noise : 0u);
    const std::uint32_t nan = bits | 0x00400000u;
    out[i] = static_cast<std::uint16_t>((magnitude > kInfinityBits ? nan : rounded) >> 16);
  }
}

// The half copy of `param`. One that was read for edits is in the cache already.
AH_INLINE void store_half(const UpdateSpan& span, StreamCopy stream, const float* param,
                          std::size_t at, std::size_t n) {
  auto* out = static_cast<std::uint16_t*>(span.half_out) + at;
  if (stream == nullptr || span.half_in == span.half_out) {
    return narrow(param, out, span.half_dtype, n);
  }
  alignas(64) std::uint16_t scratch[kBlock];
  narrow(param, scratch, span.half_dtype, n);
  stream(out, scratch, n * sizeof(std::uint16_t));
}

// New values on their way to where they cannot be written at once: past the caches, or to bf16.
template <std::size_t states>
struct FreshBlock {
  alignas(64) float param[kBlock];
  alignas(64) float state[states][kBlock];
};

// State `s` of a block to its place, rounded at random where it is bf16.
AH_INLINE void store_state(const UpdateSpan& span, const RandomKey& key, StreamCopy stream,
                           const float* fresh, void* out, std::size_t at, std::size_t n,
                           std::size_t s) {
  if (span.state_dtype == DType::kFloat32) {
    return stream(static_cast<float*>(out) + at, fresh, n * sizeof(float));
  }
  const auto counter = static_cast<std::uint32_t>(span.offset + at);
  const unsigned shift = s == 0 ? 16 : 0;  // two states share a random number's halves
  narrow_at_random(fresh, static_cast<std::uint16_t*>(out) + at, n, key, counter, shift);
}

// What a tile is walked with: its streams and the scratch of one block.
template <typename Rule>
class TileWalk {
 public:
  AH_INLINE explicit TileWalk(UpdateTile<Rule>& tile)
      : tile_(tile),
        span_(*tile.span),
        streams_(Rule::states(*tile.span)),
        // A destination that is read too is in the caches already.
        past_caches_(tile.stream != nullptr && span_.param_out != span_.param_in),
        fp32_state_(span_.state_dtype == DType::kFloat32),
        key_(mix64(mix64(span_.seed + kMixStep) + static_cast<std::uint64_t>(span_.step))),
        found_(tile.by_products, span_.grad, span_.grad_dtype, tile.position, tile.end) {}

  AH_INLINE void run() {
    std::size_t at = tile_.begin;
    for (; at + kBlock <= tile_.end; at += kBlock) step(at, kBlock);  // loops of known length
    if (at < tile_.end) step(at, tile_.end - at);
    if (tile_.stream != nullptr) stream_fence();
    tile_.grad_sq_sum = found_.sq_sum();
    tile_.grad_hash = found_.hash();
  }

 private:
  AH_INLINE void step(std::size_t at, std::size_t n) {
    prefetch_ahead(at);
    UpdateBlock<Rule::kStates> block;
    block.grad = widened(span_.grad, span_.grad_dtype, at, n, grad_);
    found_.look_at(block.grad, at, n);
    block.param = current_param(span_, at, n, param_, tile_.edited);
    block.param_out = past_caches_ ? fresh_.param : span_.param_out + at;
    for (std::size_t s = 0; s < Rule::kStates; ++s) place_state(block, at, n, s);
    Rule::apply(*tile_.coefficients, block, n);
    if (span_.half_out != nullptr) store_half(span_, tile_.stream, block.param_out, at, n);
    if (past_caches_) tile_.stream(span_.param_out + at, fresh_.param, n * sizeof(float));
    if (past_caches_ || !fp32_state_) store_states(at, n);
  }

  AH_INLINE void prefetch_ahead(std::size_t at) {
    const std::size_t later = at + kBlocksAhead * kBlock;
    if (later < tile_.end) return prefetch(span_, streams_, later);
    prefetch_in_next(tile_, (later - tile_.begin) / kBlock);
  }

  AH_INLINE void place_state(UpdateBlock<Rule::kStates>& block, std::size_t at, std::size_t n,
                             std::size_t s) {
    const StateStream& stream = streams_[s];
    block.state[s] = nullptr;
    block.state_out[s] = nullptr;
    if (stream.in == nullptr) return;
    block.state[s] = widened(stream.in, span_.state_dtype, at, n, state_[s]);
    block.state_out[s] =
        past_caches_ || !fp32_state_ ? fresh_.state[s] : static_cast<float*>(stream.out) + at;
  }

  AH_INLINE void store_states(std::size_t at, std::size_t n) {
    for (std::size_t s = 0; s < Rule::kStates; ++s) {
      if (streams_[s].in == nullptr) continue;
      store_state(span_, key_, tile_.stream, fresh_.state[s], streams_[s].out, at, n, s);
    }
  }

  UpdateTile<Rule>& tile_;
  const UpdateSpan& span_;
  const std::array<StateStream, Rule::kStates> streams_;
  const bool past_caches_, fp32_state_;
  const RandomKey key_;
  alignas(64) float grad_[kBlock], param_[kBlock], state_[Rule::kStates][kBlock];
  FreshBlock<Rule::kStates> fresh_;
  ByProducts found_;
};

}  // namespace autohete
