// Weights that a loader mapped from a file: once they are copied, their pages need not stay.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace autohete {

using AddressRange = std::pair<std::uintptr_t, std::uintptr_t>;  // [begin, end)

// Gives the kernel back the whole pages of `ranges` that a file stands behind, so that a model
// read from a mapped checkpoint is never in memory twice. Nothing is lost: the pages stay mapped,
// are read again from their file when touched, and pages that were written stay. Memory with no
// file behind it is left as it is. A wish: where the kernel does not grant it (another user's
// file, other systems) nothing happens.
void release_file_pages(const std::vector<AddressRange>& ranges);

}  // namespace autohete
