// memcpy whose stores bypass the caches: a destination that will not be read soon need not be read
// before it is overwritten, and pushes nothing out.
#pragma once

#include <cstddef>

#include "csrc/base/cpu_features.h"

namespace autohete {

// Worth it from some kilobytes a piece on, or for pieces that follow each other; ends that do not
// fill 64 bytes are stored normally. Call stream_fence() once before another thread reads what was
// written. A function of its own because only AVX-512 can store a whole cache line at once, which a
// plain loop does not say (measured: 8 % of an update out of place).
using StreamCopy = void (*)(void* dst, const void* src, std::size_t bytes);
StreamCopy stream_copy_function(CpuLevel level);

void stream_fence();

}  // namespace autohete
