// A 128-bit hash of tensors' bytes, made for one question: are these gradients still the ones that
// the update was computed from?
//
// Any change of any byte is to be seen: a factor, a negation (which keeps the norm), two values
// that change places, -0 for 0. The hash does not depend on threads, on tiles, on the instruction
// set or on where the memory lies, and it costs a fraction of reading that memory. It is no
// protection against somebody who looks for collisions: the keys stand in the source.
//
// How it is made. Tensors are laid end to end, each from the next multiple of 128 items on, and cut
// into blocks of 128 items. The 32-bit words w of a block (the missing ones of a last block are 0)
// and two fixed sets of random keys k give two digests of 64 bits, with h = half a block's words:
//   digest = sum over j < h of (w[j] + k[j] mod 2^32) (w[j + h] + k[j + h] mod 2^32)     mod 2^64
// which is NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway, CRYPTO 1999): one multiplication
// for two words. Each half of the hash is the sum of mix(digest + step x end of the block) over the
// blocks, with the bijection mix of splitmix64. Sums of integers are the same in any order.
//
// What can go unseen. Two different blocks have the same NH digest for at most 2^-32 of all keys
// (theorem 1 there, for any pair of blocks), the same two digests for 2^-64. One changed word is
// always seen: it changes a digest unless the word it is paired with cancels its key, and no word
// cancels both keys. Since mix is a bijection, a difference in one block reaches the hash for
// certain. Differences in several blocks, whole blocks in other places among them, have to cancel
// in two sums of well-mixed 64-bit terms: 2^-128.
#pragma once

#include <cstdint>

namespace autohete {

struct ContentHash {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  ContentHash& operator+=(const ContentHash& other) {
    low += other.low;
    high += other.high;
    return *this;
  }
  bool operator==(const ContentHash&) const = default;
};

}  // namespace autohete
