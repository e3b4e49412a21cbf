#include "csrc/kernels/lion.h"

#include "csrc/kernels/kernels.h"
#include "csrc/kernels/lion_loop.h"
#include "csrc/kernels/update_call.h"

namespace autohete {
namespace {

using LionTile = UpdateTile<LionRule>;

AH_INLINE void lion_tile(LionTile& tile) { TileWalk<LionRule>(tile).run(); }

AH_LEVELS(kLionTile, lion_tile, LionTile)

constexpr const char* kWhere = "lion";

void check_span(const LionSpan& span) {
  const LionHyper& hyper = span.hyper;
  require_finite(kWhere, "lr", hyper.lr);
  require_fraction(kWhere, "beta1", hyper.beta1);
  require_fraction(kWhere, "beta2", hyper.beta2);
  require_finite(kWhere, "weight_decay", hyper.weight_decay);
  require_finite(kWhere, "grad_scale", hyper.grad_scale);
  check_step(kWhere, span.step);
  if (span.numel == 0) return;
  check_common(kWhere, span);
  require_given(kWhere, "exp_avg_in", span.exp_avg_in);
  require_given(kWhere, "exp_avg_out", span.exp_avg_out);
}

}  // namespace

UpdateStats lion(const LionSpan* spans, std::size_t num_spans, Workers& workers, CpuLevel level,
                 bool by_products, const std::function<void()>& beside) {
  return run_update<LionRule>(kWhere, spans, num_spans, workers, level, by_products, kLionTile,
                              check_span, nullptr, beside);
}

}  // namespace autohete
