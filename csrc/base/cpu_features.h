// Which instruction set the kernels use: detected at run time, shown and overridable.
//
// One binary holds every level. AUTOHETE_CPU=scalar|avx2|avx512 picks a lower one than the machine
// has (read once, at the first use); every level gives the same bits, so it is for tests and for
// finding faults only.
#pragma once

#include <string>
#include <vector>

namespace autohete {

enum class CpuLevel {
  kScalar,  // what the compiler assumes anyway: SSE2 on x86-64, NEON on aarch64
  kAvx2,
  kAvx512,  // F, BW, DQ and VL
};

const char* cpu_level_name(CpuLevel level);

// Throws std::invalid_argument naming `where` when `name` is not scalar, avx2 or avx512.
CpuLevel parse_cpu_level(const std::string& name, const char* where);

// The levels this machine and its operating system can run, lowest first.
std::vector<CpuLevel> supported_cpu_levels();

// Throws std::invalid_argument when this machine cannot run `level`.
void require_supported(CpuLevel level, const char* where);

// The level in use: the highest supported one, or AUTOHETE_CPU. Throws std::invalid_argument when
// AUTOHETE_CPU is not a level or not supported here.
CpuLevel cpu_level();

}  // namespace autohete
