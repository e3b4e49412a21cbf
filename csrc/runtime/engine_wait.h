// How the engine's methods wait for each other's lanes, and count why. For its own sources.
#pragma once

#include <chrono>

#include "csrc/runtime/engine.h"

namespace autohete {

// Until ready, also when a lane failed: a task that runs reads and writes until it has ended.
template <typename Predicate>
void Engine::tick_until(Lock& lock, Predicate ready) {
  constexpr std::chrono::milliseconds kTick(100);
  while (!changed_.wait_for(lock, kTick, ready)) {
    if (!wait_tick_) continue;
    lock.unlock();
    wait_tick_();  // a throw leaves with the lock open, which its destructor knows
    lock.lock();
  }
}

// Until ready, or a lane failed.
template <typename Predicate>
void Engine::wait_ticking(Lock& lock, Predicate ready) {
  tick_until(lock, [&] { return ready() || error_; });
}

template <typename Predicate>
void Engine::wait(Lock& lock, double EngineCounters::* cause, int unit, Predicate ready) {
  if (ready() || error_) return;
  const double start = Timeline::now();
  wait_ticking(lock, ready);
  const double end = Timeline::now();
  counters_.*cause += end - start;
  timeline_.add({Lane::kCompute, unit, "wait", start, end, 0});
}

}  // namespace autohete
