// How the engine's methods wait for each other's lanes, and count why. For its own sources.
#pragma once

#include <chrono>

#include "csrc/runtime/engine.h"

namespace autohete {

// Until ready, also when a lane failed: a task that runs reads and writes until it has ended.
// `awaited`: the unit that alone can make it ready.
template <typename Predicate>
void Engine::tick_until(Lock& lock, Predicate ready, int awaited) {
  constexpr std::chrono::milliseconds kTick(100);
  auto next_tick = std::chrono::steady_clock::now() + kTick;
  while (!ready()) {
    begin_wait(awaited);
    changed_.wait_until(lock, next_tick);
    --num_waiting_;
    if (std::chrono::steady_clock::now() < next_tick) continue;
    next_tick += kTick;
    if (!wait_tick_) continue;
    lock.unlock();
    wait_tick_();  // a throw leaves with the lock open, which its destructor knows
    lock.lock();
  }
}

// Until ready, or a lane failed.
template <typename Predicate>
void Engine::wait_ticking(Lock& lock, Predicate ready, int awaited) {
  tick_until(lock, [&] { return ready() || error_; }, awaited);
}

template <typename Predicate>
void Engine::wait_for(Lock& lock, int awaited, double EngineCounters::* cause, int unit,
                      Predicate ready) {
  if (ready() || error_) return;
  const double start = Timeline::now();
  wait_ticking(lock, ready, awaited);
  const double end = Timeline::now();
  counters_.*cause += end - start;
  timeline_.add({Lane::kCompute, unit, "wait", start, end, 0});
}

// What makes it ready happens to this unit.
template <typename Predicate>
void Engine::wait(Lock& lock, double EngineCounters::* cause, int unit, Predicate ready) {
  wait_for(lock, unit, cause, unit, ready);
}

}  // namespace autohete
