// Casts.
#include <algorithm>

#include "csrc/kernels/float_mode.h"
#include "csrc/kernels/half.h"
#include "csrc/kernels/kernels.h"
#include "csrc/kernels/tile.h"
#include "csrc/runtime/workers.h"

namespace autohete {
namespace {

struct CastTile {
  void* dst;
  DType dst_dtype;
  const void* src;
  DType src_dtype;
  std::size_t begin, end;
};

AH_INLINE void cast_tile(CastTile& tile) {
  alignas(64) float scratch[kBlock];
  const bool to_float = tile.dst_dtype == DType::kFloat32;
  // Only from half to half is there a value in between that has to wait somewhere.
  const bool waits = !to_float && tile.src_dtype != DType::kFloat32;
  const std::size_t step = waits ? kBlock : tile.end - tile.begin;
  for (std::size_t at = tile.begin; at < tile.end; at += step) {
    const std::size_t n = std::min(step, tile.end - at);
    float* wide = to_float ? static_cast<float*>(tile.dst) + at : scratch;
    const float* values = widened(tile.src, tile.src_dtype, at, n, wide);
    if (!to_float) {
      narrow(values, static_cast<std::uint16_t*>(tile.dst) + at, tile.dst_dtype, n);
    }
  }
}

AH_LEVELS(kCastTile, cast_tile, CastTile)

}  // namespace

void cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t numel,
          Workers& workers, CpuLevel level) {
  require_supported(level, "cast");
  if (dst_dtype == src_dtype) {
    copy_bytes(dst, src, numel * item_bytes(dst_dtype), workers);
    return;
  }
  const auto run = kCastTile.at(level);
  workers.for_each_tile((numel + kTile - 1) / kTile, [&](std::size_t i) {
    const ExactFloatMode mode;
    CastTile tile = {dst, dst_dtype, src, src_dtype, i * kTile, std::min(numel, (i + 1) * kTile)};
    run(tile);
  });
}

}  // namespace autohete
