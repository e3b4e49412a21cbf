// Work's turn on the CPU lane: where it gives way, and how long it takes at a stated rate.
#include <time.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "csrc/runtime/engine.h"

namespace autohete {

namespace {

// Of the processor, that this thread has had.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

// On the CPU lane's thread. Returns what the work threw.
std::exception_ptr Engine::take_turn(UpdateLane& lane, int index, const char* what,
                                     std::size_t num_parameters, std::function<void()> work) {
  Turn turn{lane, index, what, num_parameters, Timeline::now()};
  Turn* const outer = std::exchange(turn_, &turn);
  std::exception_ptr error;
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  work = nullptr;
  turn.written = turn.num_parameters;
  end_part(turn);
  turn_ = outer;
  return error;
}

void Engine::give_way(std::size_t num_parameters) {
  AH_ASSERT(turn_ != nullptr);
  Turn& turn = *turn_;
  turn.written += std::min(num_parameters, turn.num_parameters - turn.written);
  if (!turn.lane.has_more_urgent()) return;
  end_part(turn);
  make_way(turn);
}

// Lets the more urgent work pass; the next part of the turn begins. At a stated rate the threads
// that had this one's core since that work's last wait (the host device's copies, which a device
// would do by itself) take no time of the lane.
void Engine::make_way(Turn& turn) {
  woken_at_ = Timeline::now();
  woken_after_ = thread_seconds();
  turn.lane.give_way();
  turn.start_seconds = Timeline::now();
  if (update_rate_ <= 0) return;
  const double passed = turn.start_seconds - woken_at_;
  turn.start_seconds -= std::max(0.0, passed - (thread_seconds() - woken_after_));
}

// Blocks for the rest of what this part of the turn would take at the stated rate, and lets more
// urgent work pass meanwhile, as a CPU that computes at this rate does between its pieces. By what
// the system woke it too late, the next part is shorter, if it follows at once.
void Engine::end_part(Turn& turn) {
  constexpr double kAtOnce = 1e-3;
  const double rate = update_rate_;
  turn.num_parameters -= turn.written;
  while (rate > 0 && turn.written > 0) {
    if (turn.start_seconds > woken_at_ + kAtOnce) overslept_ = 0;
    const double start = turn.start_seconds - std::exchange(overslept_, 0);
    const double end = start + static_cast<double>(turn.written) / rate;
    const bool early = Timeline::now() < end;
    const bool interrupted = turn.lane.wait_for_more_urgent(Timeline::time_at(end));
    woken_at_ = Timeline::now();
    if (!interrupted) {
      if (early) overslept_ = std::min(woken_at_ - end, kAtOnce);
      break;
    }
    record(turn);
    const double done = (woken_at_ - start) * rate;
    turn.written -= std::min(turn.written, static_cast<std::size_t>(done));
    make_way(turn);
  }
  turn.written = 0;
  if (rate > 0) {
    woken_at_ = Timeline::now();
    woken_after_ = thread_seconds();
  }
  record(turn);
}

void Engine::record(const Turn& turn) {
  timeline_.add({Lane::kCpu, turn.unit, turn.what, turn.start_seconds, Timeline::now(), 0});
}

}  // namespace autohete
