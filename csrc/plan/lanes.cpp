#include "csrc/plan/lanes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/base/check.h"

namespace autohete {
namespace {

constexpr double kRounding = 1e-12;  // ends this close together, relatively, are one

}  // namespace

void Lanes::begin(SimulatedLane lane, int unit, const char* what, double seconds, double chunk) {
  AH_ASSERT(!busy(lane));
  work_[index(lane)] = LaneWork{true, unit, what, now_, seconds, 0, chunk};
}

bool Lanes::overtake(SimulatedLane lane) {
  LaneWork& work = work_[index(lane)];
  if (work.leave_at > 0 || work.chunk <= 0) return false;
  const double chunks_left = std::floor(work.remaining / work.chunk * (1 - kRounding));
  if (chunks_left <= 0) return false;
  work.leave_at = chunks_left * work.chunk;
  return true;
}

std::vector<SimulatedLane> Lanes::advance() {
  double least = std::numeric_limits<double>::infinity();
  std::array<double, kNumSimulatedLanes> rates{}, until{};
  for (std::size_t i = 0; i < work_.size(); ++i) {
    if (!work_[i].busy) continue;
    const SimulatedLane lane = static_cast<SimulatedLane>(i);
    rates[i] = rate(lane) * rate_among_ranks(lane);
    until[i] = (work_[i].remaining - work_[i].leave_at) / rates[i];
    least = std::min(least, until[i]);
  }
  AH_ASSERT(std::isfinite(least));
  now_ += least;
  std::vector<SimulatedLane> ended;
  for (std::size_t i = 0; i < work_.size(); ++i) {
    if (!work_[i].busy) continue;
    const bool ends = until[i] <= least * (1 + kRounding);
    work_[i].remaining = ends ? work_[i].leave_at : work_[i].remaining - least * rates[i];
    if (ends) ended.push_back(static_cast<SimulatedLane>(i));
  }
  for (const SimulatedLane lane : ended) work_[index(lane)].busy = false;
  return ended;
}

double Lanes::rate(SimulatedLane lane) const {
  const bool up = busy(SimulatedLane::kH2d), down = busy(SimulatedLane::kD2h);
  const bool computing = busy(SimulatedLane::kCompute), updating = busy(SimulatedLane::kCpu);
  if (lane == SimulatedLane::kExchange || lane == SimulatedLane::kGather) return 1;
  if (lane == SimulatedLane::kCompute) {
    return (updating ? hardware_.compute_share_during_cpu : 1) *
           (up || down ? hardware_.compute_share_during_copy : 1);
  }
  if (lane == SimulatedLane::kCpu) {
    return (up || down ? hardware_.cpu_share_during_copy : 1) *
           (computing ? hardware_.cpu_share_during_compute : 1);
  }
  double rate = updating ? hardware_.copy_share_during_cpu : 1;
  if (lane == SimulatedLane::kH2d && down) rate *= hardware_.h2d_share_during_d2h;
  if (lane == SimulatedLane::kD2h && up) rate *= hardware_.d2h_share_during_h2d;
  return rate;
}

double Lanes::rate_among_ranks(SimulatedLane lane) const {
  const bool exchange = busy(SimulatedLane::kExchange), gather = busy(SimulatedLane::kGather);
  if (!exchange && !gather) return 1;
  if (lane == SimulatedLane::kCompute) return ranks_.compute_share_during_collective;
  if (lane == SimulatedLane::kCpu) return ranks_.cpu_share_during_collective;
  if (lane == SimulatedLane::kH2d || lane == SimulatedLane::kD2h) return 1;
  double rate = exchange && gather ? ranks_.collective_share_during_other : 1;
  if (busy(SimulatedLane::kCompute)) rate *= ranks_.collective_share_during_compute;
  if (busy(SimulatedLane::kCpu)) rate *= ranks_.collective_share_during_cpu;
  return rate;
}

}  // namespace autohete
