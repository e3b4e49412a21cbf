// bf16 and fp16 <-> fp32, one value at a time and without branches, so that the loops around them
// vectorise at every level. Rounding is to nearest even; any NaN becomes the quiet one, 0x7fc0 or
// 0x7e00 with its sign; fp16 overflows to infinity from 65520 on, as IEEE 754 says.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/kernels/levels.h"
#include "csrc/kernels/update.h"

namespace autohete {

constexpr std::int32_t kInfinityBits = 0x7f800000;

struct Bf16 {
  static AH_INLINE float widen(std::uint16_t bits) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }
  // The 16 bits of `value` rounded, in the low half.
  static AH_INLINE std::uint32_t round(float value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t nan = 0x7fc0u | ((bits >> 16) & 0x8000u);
    const bool is_nan = static_cast<std::int32_t>(bits & 0x7fffffffu) > kInfinityBits;
    return is_nan ? nan : rounded;
  }
};

struct Fp16 {
  // Exponent and fraction moved to their place are the value x 2^-112, subnormals included.
  static AH_INLINE float widen(std::uint16_t half) {
    const std::uint32_t bits = half;
    const float scaled = __builtin_bit_cast(float, (bits & 0x7fffu) << 13) * 0x1p112f;
    const std::uint32_t magnitude = __builtin_bit_cast(std::uint32_t, scaled);
    const std::uint32_t top = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // inf and NaN
    return __builtin_bit_cast(float, magnitude | top | (bits & 0x8000u) << 16);
  }
  static AH_INLINE std::uint32_t round(float value) {
    const auto all = __builtin_bit_cast(std::uint32_t, value);
    const auto bits = static_cast<std::int32_t>(all & 0x7fffffffu);
    // Normal: rebias the exponent (15 for 127), then round the 13 bits that go. A carry runs into
    // the exponent, and from 65520 on into infinity, which is right.
    const std::int32_t normal = (bits - (112 << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    // Below 2^-14 the unit is 2^-24: adding 0.5 makes the adder round to it.
    const float shifted = __builtin_bit_cast(float, bits) + 0.5f;
    const std::int32_t subnormal = __builtin_bit_cast(std::int32_t, shifted) - (126 << 23);
    std::int32_t result = bits < (113 << 23) ? subnormal : normal;
    result = bits >= (143 << 23) ? 0x7c00 : result;
    result = bits > kInfinityBits ? 0x7e00 : result;
    return static_cast<std::uint32_t>(result) | ((all >> 16) & 0x8000u);
  }
};

template <typename Half>
AH_INLINE void widen_loop(const std::uint16_t* in, float* out, std::size_t n) {
  AH_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) out[i] = Half::widen(in[i]);
}

template <typename Half>
AH_INLINE void narrow_loop(const float* in, std::uint16_t* out, std::size_t n) {
  AH_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::uint16_t>(Half::round(in[i]));
}

// The values at `in` + `offset` as fp32: the memory itself, or widened into `scratch`.
AH_INLINE const float* widened(const void* in, DType dtype, std::size_t offset, std::size_t n,
                               float* scratch) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(in) + offset;
  const auto* halves = static_cast<const std::uint16_t*>(in) + offset;
  if (dtype == DType::kBFloat16) {
    widen_loop<Bf16>(halves, scratch, n);
  } else {
    widen_loop<Fp16>(halves, scratch, n);
  }
  return scratch;
}

AH_INLINE void narrow(const float* in, std::uint16_t* out, DType dtype, std::size_t n) {
  if (dtype == DType::kBFloat16) {
    narrow_loop<Bf16>(in, out, n);
  } else {
    narrow_loop<Fp16>(in, out, n);
  }
}

}  // namespace autohete
