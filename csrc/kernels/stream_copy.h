// memcpy whose stores bypass the caches: a destination that will not be read soon need not be read
// before it is overwritten, and pushes nothing out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "csrc/kernels/levels.h"

namespace autohete {

// Call stream_fence() once before another thread reads what was written. Worth it from some
// kilobytes a piece on or for pieces that follow each other; ends that do not fill 64 bytes are
// stored normally.
AH_INLINE void stream_copy(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
#if defined(__SSE2__)
  const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(to) % 64);
  std::memcpy(to, from, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64) {
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
#else
  std::memcpy(to, from, bytes);
#endif
}

AH_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace autohete
