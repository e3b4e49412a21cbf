#include "csrc/kernels/sgd.h"

#include "csrc/kernels/kernels.h"
#include "csrc/kernels/sgd_loop.h"
#include "csrc/kernels/update_call.h"

namespace autohete {
namespace {

using SgdTile = UpdateTile<SgdRule>;

AH_INLINE void sgd_tile(SgdTile& tile) { TileWalk<SgdRule>(tile).run(); }

AH_LEVELS(kSgdTile, sgd_tile, SgdTile)

constexpr const char* kWhere = "sgd";

void check_span(const SgdSpan& span) {
  const SgdHyper& hyper = span.hyper;
  require_finite(kWhere, "lr", hyper.lr);
  require(hyper.momentum >= 0 && std::isfinite(hyper.momentum), kWhere, ": momentum is ",
          hyper.momentum, ", expected a finite number >= 0");
  require_finite(kWhere, "dampening", hyper.dampening);
  require_finite(kWhere, "weight_decay", hyper.weight_decay);
  require_finite(kWhere, "grad_scale", hyper.grad_scale);
  require(!hyper.nesterov || (hyper.momentum > 0 && hyper.dampening == 0), kWhere,
          ": nesterov is set with momentum ", hyper.momentum, " and dampening ", hyper.dampening,
          ", expected a momentum and no dampening");
  if (span.numel == 0) return;
  check_common(kWhere, span);
  if (hyper.momentum == 0) return;
  require_given(kWhere, "momentum_in", span.momentum_in);
  require_given(kWhere, "momentum_out", span.momentum_out);
}

}  // namespace

UpdateStats sgd(const SgdSpan* spans, std::size_t num_spans, Workers& workers, CpuLevel level,
                bool by_products, const std::function<void()>& beside) {
  return run_update<SgdRule>(kWhere, spans, num_spans, workers, level, by_products, kSgdTile,
                             check_span, nullptr, beside);
}

}  // namespace autohete
