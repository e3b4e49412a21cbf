// The floating-point mode of the current thread, for the length of a scope.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace autohete {

// Round to nearest even, subnormal numbers kept. torch.set_flush_denormal sets a flag of one
// thread only; without this a tile's bits would depend on the thread that ran it. The work inside
// must be behind a call that the compiler cannot see through (the LevelTable's pointer is).
class ExactFloatMode {
 public:
#if defined(__SSE__)
  ExactFloatMode() : before_(_mm_getcsr()) {
    if (before_ != kDefault) _mm_setcsr(kDefault);
  }
  ~ExactFloatMode() {
    if (before_ != kDefault) _mm_setcsr(before_);
  }
#else
  ExactFloatMode() = default;
#endif
  ExactFloatMode(const ExactFloatMode&) = delete;
  ExactFloatMode& operator=(const ExactFloatMode&) = delete;

#if defined(__SSE__)
 private:
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, no flags, no FTZ, no DAZ
  const unsigned before_;
#endif
};

}  // namespace autohete
