// AdamW / Adam in one pass over memory, on the host.
//
// The rule is torch.optim.AdamW's (Loshchilov and Hutter, arXiv 1711.05101) or, with
// `decoupled_decay` off, torch.optim.Adam's L2. Gradients are read once, scaled, and the
// parameter, both moments and (in the half regime) the half copy are written once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace autohete {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };
constexpr std::size_t item_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct AdamHyper {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled_decay = true;  // AdamW; false: Adam with L2
  bool maximize = false;
  bool amsgrad = false;
  // Gradient is multiplied by this before use: 1 / loss scale x clip factor.
  double grad_scale = 1.0;
  bool operator==(const AdamHyper&) const = default;
};

// One tensor (or a piece of one). Pointers need no alignment beyond their item's. Ranges of one
// span must not overlap each other. In place: the *_in and *_out pointers are equal.
struct AdamSpan {
  std::size_t numel = 0;
  const void* grad = nullptr;  // numel items of grad_dtype
  DType grad_dtype = DType::kFloat32;
  const float* param_in = nullptr;  // fp32 parameter or fp32 master
  const float* exp_avg_in = nullptr;
  const float* exp_avg_sq_in = nullptr;
  const float* max_exp_avg_sq_in = nullptr;  // amsgrad only
  float* param_out = nullptr;
  float* exp_avg_out = nullptr;
  float* exp_avg_sq_out = nullptr;
  float* max_exp_avg_sq_out = nullptr;
  // The half copy that the user sees, numel items of half_dtype; or null. Where it is not param_in
  // rounded, the user has edited it, and the value there is used instead of param_in.
  const void* half_in = nullptr;
  void* half_out =
      nullptr;  // numel items of half_dtype: param_out rounded to nearest even; or null
  DType half_dtype = DType::kBFloat16;
  double step = 1;  // the step number this update is (1 for the first), bias correction in double
  AdamHyper hyper{};
};

}  // namespace autohete
