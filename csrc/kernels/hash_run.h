// The content hash for kernels: a run of items, wherever it lies in what is hashed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/base/cpu_features.h"
#include "csrc/kernels/content_hash.h"
#include "csrc/kernels/tile.h"

namespace autohete {

// How far the next tensor begins behind one of `numel` items.
constexpr std::uint64_t hashed_items(std::uint64_t numel) {
  return (numel + kHashBlock - 1) / kHashBlock * kHashBlock;
}

// `numel` items, of which the first is item `position` (a multiple of kHashBlock) of all that is
// hashed. Their blocks are added to `sum`.
struct HashRun {
  std::size_t item_bytes;  // 4 or 2
  const void* items = nullptr;
  std::uint64_t position = 0;
  std::size_t numel = 0;
  ContentHash sum{};
};

// A function of its own, not inlined into the loops that use it: the AVX-512 one is not the plain
// loop compiled once more.
using HashFunction = void (*)(HashRun&);
HashFunction hash_function(CpuLevel level);

}  // namespace autohete
