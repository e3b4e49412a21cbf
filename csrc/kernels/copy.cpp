// Copies in chunks over the workers.
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "csrc/kernels/kernels.h"
#include "csrc/runtime/workers.h"

namespace autohete {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 20;
// Measured by benchmarks/copies.py. Below the first a copy is over before a worker wakes up; from
// the second on the destination would push everything else out of the caches, and stores that
// bypass them save reading it first.
constexpr std::size_t kParallelBytes = std::size_t{1} << 20;
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

// memcpy whose stores bypass the caches.
void stream_copy(char* dst, const char* src, std::size_t bytes) {
#if defined(__SSE2__)
  const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(dst) % 64);
  std::memcpy(dst, src, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(src + i);
    auto* to = reinterpret_cast<__m128i*>(dst + i);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + i, src + i, bytes - i);
  _mm_sfence();
#else
  std::memcpy(dst, src, bytes);
#endif
}

}  // namespace

void copy_bytes(void* dst, const void* src, std::size_t bytes, Workers& workers) {
  if (bytes == 0 || dst == src) return;
  if (bytes < kParallelBytes) {
    std::memcpy(dst, src, bytes);
    return;
  }
  const bool stream = bytes >= kStreamBytes;
  workers.for_each_tile((bytes + kChunk - 1) / kChunk, [&](std::size_t i) {
    const std::size_t at = i * kChunk;
    const std::size_t n = std::min(kChunk, bytes - at);
    auto* to = static_cast<char*>(dst) + at;
    const auto* from = static_cast<const char*>(src) + at;
    if (stream) {
      stream_copy(to, from, n);
    } else {
      std::memcpy(to, from, n);
    }
  });
}

}  // namespace autohete
