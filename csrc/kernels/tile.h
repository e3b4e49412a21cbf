// How kernels cut a tensor: workers take tiles, and a tile is walked block by block.
#pragma once

#include <cstddef>

namespace autohete {

// All streams of a block fit the first-level cache, so each step over a block is a plain loop of
// its own and memory is still passed over once. (Measured with 32 to 512 values: with 128 the
// loops over a block leave memory idle for longer than out-of-order execution can bridge, 13 %.)
constexpr std::size_t kBlock = 64;

// The content hash is defined over blocks of this many items, a whole number of the above.
constexpr std::size_t kHashBlock = 128;

// Long enough that claiming a tile costs nothing beside it, short enough that a million values
// still divide evenly over the workers. A whole number of hash blocks. Sums are formed tile by
// tile: whatever is to have the same bits has to be cut alike.
constexpr std::size_t kTile = 256 * kHashBlock;

}  // namespace autohete
