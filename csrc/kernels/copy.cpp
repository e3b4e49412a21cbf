// Copies in chunks over the workers.
#include <algorithm>
#include <cstring>

#include "csrc/kernels/kernels.h"
#include "csrc/kernels/stream_copy.h"
#include "csrc/runtime/workers.h"

namespace autohete {
namespace {

constexpr std::size_t kChunk = std::size_t{256} << 10;
// Measured by benchmarks/copies.py. Below the first a copy is over before a worker wakes up; from
// the second on the destination would push everything else out of the caches, and stores that
// bypass them save reading it first.
constexpr std::size_t kParallelBytes = std::size_t{2} << 20;
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

}  // namespace

void copy_bytes(void* dst, const void* src, std::size_t bytes, Workers& workers) {
  if (bytes == 0 || dst == src) return;
  if (bytes < kParallelBytes) {
    std::memcpy(dst, src, bytes);
    return;
  }
  const bool stream = bytes >= kStreamBytes;
  const StreamCopy stream_copy = stream_copy_function(cpu_level());
  workers.for_each_tile((bytes + kChunk - 1) / kChunk, [&](std::size_t i) {
    const std::size_t at = i * kChunk;
    const std::size_t n = std::min(kChunk, bytes - at);
    auto* to = static_cast<char*>(dst) + at;
    const auto* from = static_cast<const char*>(src) + at;
    if (stream) {
      stream_copy(to, from, n);
      stream_fence();
    } else {
      std::memcpy(to, from, n);
    }
  });
}

}  // namespace autohete
