// How a plain loop becomes one function per instruction set.
//
// A loop is written once as an AH_INLINE function that takes one struct of arguments; the wrappers
// of AH_LEVELS compile it for each level, and at() picks one. Only +, -, *, /, sqrt and integer
// operations are used and contraction into fused multiply-add is off, so every level rounds in the
// same places and gives the same bits. (The other way, fma everywhere, costs the plain level a
// software fma of some 50 ns an element, and the update is as exact without: see adamw_loop.h.)
#pragma once

#include "csrc/base/cpu_features.h"

#define AH_INLINE inline __attribute__((always_inline))

// Iterations of the next loop are independent, though an output may be the input itself.
#if defined(__clang__)
#define AH_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define AH_INDEPENDENT _Pragma("GCC ivdep")
#endif

#if defined(__x86_64__)
#define AH_TARGET_AVX2 __attribute__((target("avx2")))
#if defined(__clang__)
#define AH_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define AH_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
// Defines `name`: the LevelTable of `loop`, a function void(Args&).
#define AH_LEVELS(name, loop, Args)                               \
  void loop##_scalar(Args& args) { loop(args); }                  \
  AH_TARGET_AVX2 void loop##_avx2(Args& args) { loop(args); }     \
  AH_TARGET_AVX512 void loop##_avx512(Args& args) { loop(args); } \
  constexpr LevelTable<Args> name = {loop##_scalar, loop##_avx2, loop##_avx512};
#else
#define AH_LEVELS(name, loop, Args)              \
  void loop##_scalar(Args& args) { loop(args); } \
  constexpr LevelTable<Args> name = {loop##_scalar, loop##_scalar, loop##_scalar};
#endif

namespace autohete {

template <typename Args>
struct LevelTable {
  using Function = void (*)(Args&);
  Function scalar, avx2, avx512;

  Function at(CpuLevel level) const {
    if (level == CpuLevel::kAvx512) return avx512;
    return level == CpuLevel::kAvx2 ? avx2 : scalar;
  }
};

}  // namespace autohete
