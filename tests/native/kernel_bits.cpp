// Runs every kernel over data that any machine makes alike, and prints the level in use and a hash
// of all results. tests/kernels/test_emulated_cpus.py runs it on emulated processors.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "csrc/base/cpu_features.h"
#include "csrc/kernels/kernels.h"
#include "csrc/runtime/workers.h"

namespace autohete {
namespace {

constexpr std::size_t kNumel = 40007;
constexpr std::size_t kLarge = std::size_t{3} << 20;  // so many that stores bypass the caches

std::vector<float> values(std::size_t numel, unsigned seed) {
  std::vector<float> made(numel);
  std::uint32_t x = seed;
  for (float& value : made) {
    x = x * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-31f;
  }
  return made;
}

struct State {
  std::vector<float> param, first, second, grad;
  std::vector<std::uint16_t> half, narrow_grad, bf16_first, bf16_second;

  State(std::size_t numel, Workers& workers)
      : param(values(numel, 1)),
        first(values(numel, 2)),
        second(numel, 0.25f),
        grad(values(numel, 3)),
        half(numel),
        narrow_grad(numel),
        bf16_first(numel),
        bf16_second(numel) {
    cast(half.data(), DType::kBFloat16, param.data(), DType::kFloat32, numel, workers);
    cast(narrow_grad.data(), DType::kFloat16, grad.data(), DType::kFloat32, numel, workers);
    cast(bf16_first.data(), DType::kBFloat16, first.data(), DType::kFloat32, numel, workers);
    cast(bf16_second.data(), DType::kBFloat16, second.data(), DType::kFloat32, numel, workers);
    half[7] ^= 1;
  }

  template <typename Span>
  Span span() {
    Span made;
    made.numel = param.size();
    made.grad = grad.data();
    made.param_in = made.param_out = param.data();
    made.half_in = made.half_out = half.data();
    return made;
  }

  std::vector<GradSpan> all() const {
    const std::size_t n = param.size();
    return {{param.data(), DType::kFloat32, n},       {first.data(), DType::kFloat32, n},
            {second.data(), DType::kFloat32, n},      {half.data(), DType::kBFloat16, n},
            {bf16_first.data(), DType::kBFloat16, n}, {bf16_second.data(), DType::kBFloat16, n}};
  }
};

UpdateStats update_by_every_rule(State& state, Workers& workers) {
  auto adam = state.span<AdamSpan>();
  adam.hyper = {1e-3, 0.9, 0.999, 1e-8, 0.01};
  adam.exp_avg_in = adam.exp_avg_out = state.first.data();
  adam.exp_avg_sq_in = adam.exp_avg_sq_out = state.second.data();
  UpdateStats stats = adamw(&adam, 1, workers);
  adam.grad = state.narrow_grad.data();
  adam.grad_dtype = DType::kFloat16;
  adam.state_dtype = DType::kBFloat16;
  adam.exp_avg_in = adam.exp_avg_out = state.bf16_first.data();
  adam.exp_avg_sq_in = adam.exp_avg_sq_out = state.bf16_second.data();
  adamw(&adam, 1, workers);
  auto momentum = state.span<SgdSpan>();
  momentum.hyper = {0.1, 0.9, 0.0, 0.01, true};
  momentum.momentum_in = momentum.momentum_out = state.first.data();
  sgd(&momentum, 1, workers);
  auto signs = state.span<LionSpan>();
  signs.hyper = {1e-3, 0.9, 0.99, 0.1};
  signs.exp_avg_in = signs.exp_avg_out = state.second.data();
  lion(&signs, 1, workers);
  return stats;
}

void print(const char* name, const UpdateStats& stats, const ContentHash& hash) {
  std::printf("%s %a %zu %016llx%016llx %016llx%016llx\n", name, stats.grad_sq_norm, stats.edited,
              static_cast<unsigned long long>(stats.grad_hash.high),
              static_cast<unsigned long long>(stats.grad_hash.low),
              static_cast<unsigned long long>(hash.high),
              static_cast<unsigned long long>(hash.low));
}

void run(const char* name, std::size_t numel, Workers& workers) {
  State state(numel, workers);
  const UpdateStats stats = update_by_every_rule(state, workers);
  State copy(numel, workers);
  copy_bytes(copy.param.data(), state.param.data(), numel * sizeof(float), workers);
  copy.first = state.first;
  copy.second = state.second;
  copy.half = state.half;
  copy.bf16_first = state.bf16_first;
  copy.bf16_second = state.bf16_second;
  const auto spans = copy.all();
  print(name, stats, content_hash(spans.data(), spans.size(), workers));
}

}  // namespace
}  // namespace autohete

int main() {
  autohete::Workers workers(2);
  std::printf("%s\n", autohete::cpu_level_name(autohete::cpu_level()));
  autohete::run("small", autohete::kNumel, workers);
  autohete::run("large", autohete::kLarge, workers);
}
