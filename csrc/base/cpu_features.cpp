#include "csrc/base/cpu_features.h"

#include <algorithm>
#include <cstdlib>

#include "csrc/base/check.h"

namespace autohete {
namespace {

constexpr CpuLevel kLevels[] = {CpuLevel::kScalar, CpuLevel::kAvx2, CpuLevel::kAvx512};

bool supported(CpuLevel level) {
  if (level == CpuLevel::kScalar) return true;
#if defined(__x86_64__)
  // The builtin also asks whether the operating system saves the wide registers.
  __builtin_cpu_init();
  if (level == CpuLevel::kAvx2) return __builtin_cpu_supports("avx2");
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

CpuLevel level_in_use() {
  const char* name = std::getenv("AUTOHETE_CPU");
  if (name == nullptr || *name == '\0') return supported_cpu_levels().back();
  const CpuLevel level = parse_cpu_level(name, "AUTOHETE_CPU");
  require_supported(level, "AUTOHETE_CPU");
  return level;
}

}  // namespace

const char* cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kScalar:
      return "scalar";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
  }
  return "unknown";
}

CpuLevel parse_cpu_level(const std::string& name, const char* where) {
  for (const CpuLevel level : kLevels) {
    if (name == cpu_level_name(level)) return level;
  }
  throw std::invalid_argument(concat(where, ": level is '", name,
                                     "', expected scalar, avx2 or avx512; leave it out to use the "
                                     "highest that this machine has"));
}

std::vector<CpuLevel> supported_cpu_levels() {
  std::vector<CpuLevel> levels;
  for (const CpuLevel level : kLevels) {
    if (supported(level)) levels.push_back(level);
  }
  return levels;
}

void require_supported(CpuLevel level, const char* where) {
  require(supported(level), where, ": level is ", cpu_level_name(level), ", expected at most ",
          cpu_level_name(supported_cpu_levels().back()), " on this machine; choose a lower one");
}

CpuLevel cpu_level() {
  static const CpuLevel level = level_in_use();
  return level;
}

}  // namespace autohete
