// What every update rule is told of a tensor: gradient in, parameter, half copy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace autohete {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };
constexpr std::size_t item_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// One tensor (or a piece of one). Pointers need no alignment beyond their item's. Ranges of one
// span must not overlap each other. In place: the *_in and *_out pointers are equal. State is fp32,
// or by the user's explicit choice bf16, see below.
struct UpdateSpan {
  std::size_t numel = 0;
  const void* grad = nullptr;  // numel items of grad_dtype
  DType grad_dtype = DType::kFloat32;
  const float* param_in = nullptr;  // fp32 parameter or fp32 master
  float* param_out = nullptr;
  // The half copy that the user sees, numel items of half_dtype; or null. Where it is not param_in
  // rounded, the user has edited it, and the value there is used instead of param_in.
  const void* half_in = nullptr;
  // numel items of half_dtype: param_out rounded to nearest even; or null
  void* half_out = nullptr;
  DType half_dtype = DType::kBFloat16;
  double step = 1;  // the step number this update is (1 for the first)

  // bf16 state is rounded stochastically, up with the probability that keeps the expectation: to
  // nearest, a moment would stop moving once its change is below half a unit. What an item gets
  // depends on seed, step and its place in the tensor only. Tensors need seeds of their own.
  DType state_dtype = DType::kFloat32;  // or kBFloat16
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;  // items of the tensor before this span
};

}  // namespace autohete
