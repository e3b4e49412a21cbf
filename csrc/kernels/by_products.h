// What a pass over gradients finds out on the way: squared norm and content hash.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "csrc/kernels/hash_run.h"
#include "csrc/kernels/levels.h"
#include "csrc/kernels/square_sum.h"
#include "csrc/kernels/update.h"

namespace autohete {

// Which of them are wanted.
struct Wanted {
  bool norm;
  HashFunction hash;  // or null
};

// Of one tile, which begins at a whole hash block; `position` is its span's in what is hashed.
class ByProducts {
 public:
  AH_INLINE ByProducts(Wanted wanted, const void* grad, DType dtype, std::uint64_t position,
                       std::size_t tile_end)
      : wanted_(wanted),
        grad_(static_cast<const char*>(grad)),
        position_(position),
        tile_end_(tile_end),
        run_{item_bytes(dtype)} {}

  // The next block: items [at, at + n) of the span, and their values.
  AH_INLINE void look_at(const float* values, std::size_t at, std::size_t n) {
    if (wanted_.norm) squares_.add(values, at, n);
    if (wanted_.hash == nullptr || at % kHashBlock != 0) return;
    run_.items = grad_ + at * run_.item_bytes;
    run_.position = position_ + at;
    run_.numel = std::min(kHashBlock, tile_end_ - at);
    wanted_.hash(run_);
  }

  AH_INLINE double sq_sum() { return squares_.total(); }
  AH_INLINE const ContentHash& hash() const { return run_.sum; }

 private:
  const Wanted wanted_;
  const char* const grad_;
  const std::uint64_t position_;
  const std::size_t tile_end_;
  SquareSum squares_;
  HashRun run_;
};

}  // namespace autohete
