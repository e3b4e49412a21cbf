#include "csrc/kernels/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "csrc/kernels/levels.h"

namespace autohete {
namespace {

#if defined(__x86_64__)
constexpr std::size_t kLine = 64;

// Copies up to the destination's first whole line, and returns how much that was.
AH_INLINE std::size_t copy_head(char* to, const char* from, std::size_t bytes) {
  const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(to) % kLine);
  std::memcpy(to, from, head);
  return head;
}

void stream_copy_sse2(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  std::size_t i = copy_head(to, from, bytes);
  for (; i + kLine <= bytes; i += kLine) {
    const auto* in = reinterpret_cast<const __m128i*>(from + i);
    auto* out = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(to + i, from + i, bytes - i);
}

AH_TARGET_AVX512 void stream_copy_avx512(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  std::size_t i = copy_head(to, from, bytes);
  for (; i + kLine <= bytes; i += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  }
  std::memcpy(to + i, from + i, bytes - i);
}
#else
void copy(void* dst, const void* src, std::size_t bytes) { std::memcpy(dst, src, bytes); }
#endif

}  // namespace

#if defined(__x86_64__)
StreamCopy stream_copy_function(CpuLevel level) {
  return level == CpuLevel::kAvx512 ? stream_copy_avx512 : stream_copy_sse2;
}

void stream_fence() { _mm_sfence(); }
#else
StreamCopy stream_copy_function(CpuLevel) { return copy; }

void stream_fence() {}
#endif

}  // namespace autohete
