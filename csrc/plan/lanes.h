// Lanes (device compute, H2D, D2H, CPU, and of several ranks exchange and gather) that each do one
// thing at a time and slow each other down where they share a link, memory or cores. Knows time and
// rates, nothing of training: the simulator says what begins, and is told what has ended.
//
// Value semantics, one thread, deterministic.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "csrc/plan/plan.h"
#include "csrc/plan/simulator.h"

namespace autohete {

// What one lane is doing. `remaining` is in seconds at the full rate.
struct LaneWork {
  bool busy = false;
  int unit = -1;
  const char* what = "";
  double start = 0;
  double remaining = 0;
  double leave_at = 0;  // stop when remaining falls to this: 0, or a chunk's end when overtaken
  double chunk = 0;     // seconds between the places where it can be overtaken; 0: nowhere
};

class Lanes {
 public:
  Lanes(const HardwareProfile& hardware, const RankProfile& ranks)
      : hardware_(hardware), ranks_(ranks) {}

  double now() const { return now_; }
  const LaneWork& operator[](SimulatedLane lane) const { return work_[index(lane)]; }

  // Starts work on a lane that is not busy.
  void begin(SimulatedLane lane, int unit, const char* what, double seconds, double chunk = 0);

  // Makes a lane's copy end at its next chunk; true when that is news, false when it is too late,
  // already asked for, or its work cannot be overtaken.
  bool overtake(SimulatedLane lane);

  // Moves time to the next end of anything and returns the lanes that ended, in their order. They
  // are no longer busy; `remaining` above 0 tells that one was overtaken. Something must be busy.
  std::vector<SimulatedLane> advance();

 private:
  static std::size_t index(SimulatedLane lane) { return static_cast<std::size_t>(lane); }
  bool busy(SimulatedLane lane) const { return work_[index(lane)].busy; }
  double rate(SimulatedLane lane) const;  // share of the full rate, given what else is busy

  // The share of it that collectives leave to a lane, or that a collective keeps.
  double rate_among_ranks(SimulatedLane lane) const;

  const HardwareProfile hardware_;
  const RankProfile ranks_;
  std::array<LaneWork, kNumSimulatedLanes> work_;
  double now_ = 0;
};

}  // namespace autohete
