// How kernels cut a tensor: workers take tiles, and a tile is walked block by block.
#pragma once

#include <cstddef>

namespace autohete {

// All streams of a block fit the first-level cache, so each step over a block is a plain loop of
// its own and memory is still passed over once.
constexpr std::size_t kBlock = 128;

// Long enough that claiming a tile costs nothing beside it, short enough that a million values
// still divide evenly over the workers. A whole number of blocks. Sums are formed tile by tile:
// whatever is to have the same bits has to be cut alike.
constexpr std::size_t kTile = 256 * kBlock;

}  // namespace autohete
