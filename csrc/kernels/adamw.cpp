#include "csrc/kernels/adamw.h"

#include "csrc/kernels/adamw_loop.h"
#include "csrc/kernels/kernels.h"
#include "csrc/kernels/update_call.h"

namespace autohete {
namespace {

using AdamTile = UpdateTile<AdamRule>;

AH_INLINE void adamw_tile(AdamTile& tile) { TileWalk<AdamRule>(tile).run(); }

AH_LEVELS(kAdamwTile, adamw_tile, AdamTile)

constexpr const char* kWhere = "adamw";

void check_hyper(const AdamHyper& hyper) {
  require_finite(kWhere, "lr", hyper.lr);
  require_fraction(kWhere, "beta1", hyper.beta1);
  require_fraction(kWhere, "beta2", hyper.beta2);
  require_finite(kWhere, "weight_decay", hyper.weight_decay);
  require_finite(kWhere, "grad_scale", hyper.grad_scale);
  require(hyper.eps >= 0, kWhere, ": eps is ", hyper.eps, ", expected eps >= 0");
}

void check_span(const AdamSpan& span) {
  check_hyper(span.hyper);
  check_step(kWhere, span.step);
  if (span.numel == 0) return;
  check_common(kWhere, span);
  require_given(kWhere, "exp_avg_in", span.exp_avg_in);
  require_given(kWhere, "exp_avg_sq_in", span.exp_avg_sq_in);
  require_given(kWhere, "exp_avg_out", span.exp_avg_out);
  require_given(kWhere, "exp_avg_sq_out", span.exp_avg_sq_out);
  if (!span.hyper.amsgrad) return;
  require_given(kWhere, "max_exp_avg_sq_in", span.max_exp_avg_sq_in);
  require_given(kWhere, "max_exp_avg_sq_out", span.max_exp_avg_sq_out);
  require(span.state_dtype == DType::kFloat32, kWhere,
          ": state_dtype is bfloat16 with amsgrad, expected float32; a maximum of randomly rounded "
          "values would only grow");
}

}  // namespace

UpdateStats adamw(const AdamSpan* spans, std::size_t num_spans, Workers& workers, CpuLevel level,
                  bool by_products, const std::function<void()>& beside) {
  return run_update<AdamRule>(kWhere, spans, num_spans, workers, level, by_products, kAdamwTile,
                              check_span, nullptr, beside);
}

UpdateStats adamw_in_pieces(const AdamSpan* spans, std::size_t num_spans, Workers& workers,
                            bool by_products, const std::function<void(std::size_t)>& between,
                            const std::uint64_t* positions) {
  return run_update<AdamRule>(kWhere, spans, num_spans, workers, cpu_level(), by_products,
                              kAdamwTile, check_span, between, nullptr, positions);
}

}  // namespace autohete
