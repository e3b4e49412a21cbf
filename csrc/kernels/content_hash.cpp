#include "csrc/kernels/content_hash.h"

#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "csrc/kernels/hash_run.h"
#include "csrc/kernels/levels.h"
#include "csrc/kernels/mix.h"

namespace autohete {
namespace {

// A key for each word of a block of fp32 values; blocks of halves use the first of them.
struct HashKeys {
  alignas(64) std::uint32_t low[kHashBlock], high[kHashBlock];

  constexpr HashKeys() : low{}, high{} {
    for (std::size_t i = 0; i < kHashBlock; ++i) {
      const std::uint64_t random = mix64((i + 1) * kMixStep);
      low[i] = static_cast<std::uint32_t>(random);
      high[i] = static_cast<std::uint32_t>(random >> 32);
    }
  }
};

constexpr HashKeys kHashKeys;

// NH of a block with one set of keys. (A loop for both: GCC 12 puts shuffles into it.)
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

struct PlainDigests {
  template <std::size_t words>
  static AH_INLINE ContentHash of(const char* block) {
    return {digest<words>(block, kHashKeys.low), digest<words>(block, kHashKeys.high)};
  }
};

#if defined(__x86_64__)
// The same with 64-byte registers, where GCC 12 would multiply words as 64-bit numbers, at half the
// speed: products of even and of odd words, since the sum does not ask for their order. (The masks
// of ones are for GCC 12 too, which warns about its own plain forms.)
AH_TARGET_AVX512 inline __m512i add_products_avx512(__m512i sum, __m512i a, __m512i b) {
  const __m512i odd_a = _mm512_maskz_srli_epi64(0xff, a, 32);
  const __m512i odd_b = _mm512_maskz_srli_epi64(0xff, b, 32);
  const __m512i even = _mm512_maskz_mul_epu32(0xff, a, b);
  return _mm512_add_epi64(sum, _mm512_add_epi64(even, _mm512_maskz_mul_epu32(0xff, odd_a, odd_b)));
}

AH_TARGET_AVX512 inline std::uint64_t total_avx512(__m512i lanes) {
  alignas(64) std::uint64_t values[8];
  _mm512_store_si512(values, lanes);
  std::uint64_t sum = 0;
  for (const std::uint64_t value : values) sum += value;
  return sum;
}

template <std::size_t words>
AH_TARGET_AVX512 ContentHash digests_avx512(const char* block) {
  constexpr std::size_t kHalf = words / 2;
  __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();
  for (std::size_t j = 0; j < kHalf; j += 16) {
    const __m512i a = _mm512_loadu_si512(block + j * 4);
    const __m512i b = _mm512_loadu_si512(block + (j + kHalf) * 4);
    low = add_products_avx512(low, _mm512_add_epi32(a, _mm512_load_si512(kHashKeys.low + j)),
                              _mm512_add_epi32(b, _mm512_load_si512(kHashKeys.low + j + kHalf)));
    high = add_products_avx512(high, _mm512_add_epi32(a, _mm512_load_si512(kHashKeys.high + j)),
                               _mm512_add_epi32(b, _mm512_load_si512(kHashKeys.high + j + kHalf)));
  }
  return {total_avx512(low), total_avx512(high)};
}

struct Avx512Digests {
  template <std::size_t words>
  static AH_INLINE ContentHash of(const char* block) {
    return digests_avx512<words>(block);
  }
};
#endif

// The hardware's own look-ahead is too short for one stream that is read this fast (measured: half
// precision twice as fast with it, and the hash disappears in an update that waits for memory).
template <std::size_t bytes>
AH_INLINE void prefetch_ahead(const char* block) {
  constexpr std::size_t kAhead = 2048;
  for (std::size_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(block + kAhead + byte);
}

template <typename Digests, std::size_t words>
AH_INLINE void add_block(ContentHash& sum, const char* block, std::uint64_t end) {
  const ContentHash digests = Digests::template of<words>(block);
  sum.low += mix64(digests.low + end * kMixStep);
  sum.high += mix64(digests.high + end * kMixStep);
}

template <typename Digests, std::size_t words>
AH_INLINE void add_run(HashRun& run) {
  constexpr std::size_t kBytes = words * sizeof(std::uint32_t);
  const auto* block = static_cast<const char*>(run.items);
  ContentHash sum = run.sum;
  std::size_t at = 0;
  for (; at + kHashBlock <= run.numel; at += kHashBlock, block += kBytes) {
    prefetch_ahead<kBytes>(block);
    add_block<Digests, words>(sum, block, run.position + at + kHashBlock);
  }
  if (at < run.numel) {
    alignas(64) char padded[kBytes] = {};
    std::memcpy(padded, block, (run.numel - at) * run.item_bytes);
    add_block<Digests, words>(sum, padded, run.position + run.numel);
  }
  run.sum = sum;
}

template <typename Digests>
AH_INLINE void hash_run(HashRun& run) {
  if (run.item_bytes == sizeof(float)) {
    add_run<Digests, kHashBlock>(run);
  } else {
    add_run<Digests, kHashBlock / 2>(run);
  }
}

void hash_run_scalar(HashRun& run) { hash_run<PlainDigests>(run); }
#if defined(__x86_64__)
AH_TARGET_AVX2 void hash_run_avx2(HashRun& run) { hash_run<PlainDigests>(run); }
void hash_run_avx512(HashRun& run) { hash_run<Avx512Digests>(run); }
constexpr LevelTable<HashRun> kHashRun = {hash_run_scalar, hash_run_avx2, hash_run_avx512};
#else
constexpr LevelTable<HashRun> kHashRun = {hash_run_scalar, hash_run_scalar, hash_run_scalar};
#endif

}  // namespace

HashFunction hash_function(CpuLevel level) { return kHashRun.at(level); }

}  // namespace autohete
