// Bijections that spread every bit of a number over all of it: for hashes and random numbers.
#pragma once

#include <cstdint>

#include "csrc/kernels/levels.h"

namespace autohete {

// splitmix64 (Steele, Lea, Flood, OOPSLA 2014): numbers this step apart become random ones.
constexpr std::uint64_t kMixStep = 0x9e3779b97f4a7c15u;

constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Counter-based random numbers for loops that vectorise: two rounds of 32-bit multiplication (the
// constants are Wellons' lowbias32), with a key between them, so that two keys do not give the same
// sequence from different places on.
struct RandomKey {
  std::uint32_t low, high;

  explicit RandomKey(std::uint64_t key)
      : low(static_cast<std::uint32_t>(key)), high(static_cast<std::uint32_t>(key >> 32)) {}

  AH_INLINE std::uint32_t at(std::uint32_t counter) const {
    std::uint32_t x = counter + low;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15) ^ high) * 0x846ca68bu;
    return x ^ (x >> 16);
  }
};

}  // namespace autohete
