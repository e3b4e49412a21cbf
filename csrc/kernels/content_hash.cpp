#include "csrc/kernels/content_hash.h"

#include <cstddef>
#include <cstring>

#include "csrc/kernels/hash_run.h"
#include "csrc/kernels/levels.h"

namespace autohete {
namespace {

// splitmix64 (Steele, Lea, Flood, OOPSLA 2014): a step and a bijection of 64 bits.
constexpr std::uint64_t kMixStep = 0x9e3779b97f4a7c15u;

constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A key for each word of a block of fp32 values; blocks of halves use the first of them.
struct HashKeys {
  alignas(64) std::uint32_t low[kBlock], high[kBlock];

  constexpr HashKeys() : low{}, high{} {
    for (std::size_t i = 0; i < kBlock; ++i) {
      const std::uint64_t random = mix64((i + 1) * kMixStep);
      low[i] = static_cast<std::uint32_t>(random);
      high[i] = static_cast<std::uint32_t>(random >> 32);
    }
  }
};

constexpr HashKeys kHashKeys;

// NH of a block. A loop for each set of keys: GCC 12 puts shuffles into one for both.
template <std::size_t words>
AH_INLINE std::uint64_t digest(const char* block, const std::uint32_t* keys) {
  constexpr std::size_t kHalf = words / 2;
  std::uint64_t sum = 0;
  for (std::size_t j = 0; j < kHalf; ++j) {
    std::uint32_t a, b;  // floats or pairs of halves: memcpy is what may read them as words
    std::memcpy(&a, block + j * sizeof(a), sizeof(a));
    std::memcpy(&b, block + (j + kHalf) * sizeof(b), sizeof(b));
    sum += static_cast<std::uint64_t>(a + keys[j]) * (b + keys[j + kHalf]);
  }
  return sum;
}

template <std::size_t words>
AH_INLINE void add_block(ContentHash& sum, const char* block, std::uint64_t end) {
  sum.low += mix64(digest<words>(block, kHashKeys.low) + end * kMixStep);
  sum.high += mix64(digest<words>(block, kHashKeys.high) + end * kMixStep);
}

// The hardware's own look-ahead is too short for one stream that is read this fast (measured: half
// precision twice as fast with it, and the hash disappears in an update that waits for memory).
template <std::size_t bytes>
AH_INLINE void prefetch_ahead(const char* block) {
  constexpr std::size_t kAhead = 2048;
  for (std::size_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(block + kAhead + byte);
}

template <std::size_t words>
AH_INLINE void add_run(HashRun& run) {
  constexpr std::size_t kBytes = words * sizeof(std::uint32_t);
  const auto* block = static_cast<const char*>(run.items);
  ContentHash sum = run.sum;
  std::size_t at = 0;
  for (; at + kBlock <= run.numel; at += kBlock, block += kBytes) {
    prefetch_ahead<kBytes>(block);
    add_block<words>(sum, block, run.position + at + kBlock);
  }
  if (at < run.numel) {
    alignas(64) char padded[kBytes] = {};
    std::memcpy(padded, block, (run.numel - at) * run.item_bytes);
    add_block<words>(sum, padded, run.position + run.numel);
  }
  run.sum = sum;
}

AH_INLINE void hash_run(HashRun& run) {
  if (run.item_bytes == sizeof(float)) {
    add_run<kBlock>(run);
  } else {
    add_run<kBlock / 2>(run);
  }
}

AH_LEVELS(kHashRun, hash_run, HashRun)

}  // namespace

HashFunction hash_function(CpuLevel level) {
  return kHashRun.at(level == CpuLevel::kAvx512 ? CpuLevel::kAvx2 : level);
}

}  // namespace autohete
