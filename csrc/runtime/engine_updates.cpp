// From a unit's gradients to its new parameters: leaving, work ahead of step(), updates, shares.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "csrc/runtime/engine.h"
#include "csrc/runtime/engine_wait.h"

namespace autohete {

namespace {

// Of the processor, that this thread has had.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

void Engine::send_gradients(int index, std::vector<CopySegment> segments, AheadWork ahead) {
  refuse_training_in_child();
  Lock lock(mutex_);
  Unit& unit = units_.at(index);
  AH_ASSERT(unit.blocks.gradients_host != nullptr);
  wait(lock, &EngineCounters::wait_update_seconds, index,
       [&] { return unit.state.parameters_final(); });
  rethrow(lock);
  withdraw(lock, unit, /*ticking=*/false);
  unit.measure.offer(std::move(ahead.measure));
  unit.ahead.offer(std::move(ahead.update));
  unit.num_parameters = ahead.num_parameters;
  advance(unit, UnitEvent::kGradientsReady);
  std::size_t bytes = 0;
  for (const CopySegment& segment : segments) bytes += segment.bytes;
  CopyJob job;
  job.segments = std::move(segments);
  job.priority = rank(gradient_priority(index));
  job.unit = index;
  job.after = device_.record(kComputeStream);
  job.done = [this, index, bytes](std::exception_ptr error) {
    Lock inner(mutex_);
    if (error) fail(error);
    counters_.d2h_bytes += bytes;
    advance(units_[index], UnitEvent::kGradientsLanded);
    const auto num_units = static_cast<std::uint64_t>(units_.size());
    const auto place = static_cast<std::uint64_t>(index);
    queue_ahead(index, &Unit::measure, place);
    queue_ahead(index, &Unit::ahead, 2 * num_units + place);
    if (units_[index].state.progress == Progress::kUpdating) start_update(index);
    notify(index);
  };
  download_lane_->submit(std::move(job));
  if (options_.synchronous_moves)
    wait(lock, &EngineCounters::wait_gradients_seconds, index,
         [&] { return unit.state.progress != Progress::kLeaving; });
}

bool Engine::gradients_landed(int index) {
  Lock lock(mutex_);
  return units_.at(index).state.progress != Progress::kLeaving &&
         units_[index].state.progress != Progress::kCommitted;
}

void Engine::wait_gradients(int index) {
  if (in_forked_child()) return;
  Lock lock(mutex_);
  Unit& unit = units_.at(index);
  wait(lock, &EngineCounters::wait_gradients_seconds, index, [&] {
    return unit.state.progress != Progress::kLeaving && unit.state.progress != Progress::kCommitted;
  });
  rethrow(lock);
}

void Engine::wait_gradients_below(int count) {
  if (in_forked_child()) return;
  Lock lock(mutex_);
  wait(lock, &EngineCounters::wait_gradients_seconds, -1, [&] { return num_leaving_ < count; });
  rethrow(lock);
}

// With mutex_ held. A task that was offered has its gradients: the CPU lane may have it.
void Engine::queue_ahead(int index, AheadTask Unit::* task, std::uint64_t priority) {
  AheadTask& offered = units_[index].*task;
  if (stopping_ || offered.stage() != AheadTask::Stage::kOffered) return;
  const std::uint64_t ticket = offered.queue();
  update_lane_->push(rank(priority), [this, index, task, ticket](UpdateLane& lane) {
    run_ahead(lane, index, task, ticket);
  });
}

// On the CPU lane's thread.
void Engine::run_ahead(UpdateLane& lane, int index, AheadTask Unit::* task, std::uint64_t ticket) {
  std::function<void()> work;
  std::size_t num_parameters = 0;
  {
    Lock lock(mutex_);
    if (index < static_cast<int>(units_.size())) {
      work = (units_[index].*task).start(ticket);
      if (task == &Unit::ahead) num_parameters = units_[index].num_parameters;
    }
  }
  if (!work) return;
  const char* what = task == &Unit::ahead ? "update ahead" : "norm";
  const std::exception_ptr error = take_turn(lane, index, what, num_parameters, std::move(work));
  Lock lock(mutex_);
  Unit& unit = units_[index];
  (unit.*task).finish(!error);
  if (!std::exchange(unit.update_waits, false)) return notify(index);
  if (unit.ahead.stage() != AheadTask::Stage::kDone || unit.update_always) {
    start_update(index);
    return notify(index);
  }
  unit.update = nullptr;  // has been done
  updated(index);
}

bool Engine::wait_measured(int index) {
  if (in_forked_child()) return false;
  Lock lock(mutex_);
  const AheadTask& task = units_.at(index).measure;
  wait(lock, &EngineCounters::wait_gradients_seconds, index, [&] {
    return task.stage() == AheadTask::Stage::kNone || task.stage() == AheadTask::Stage::kDone;
  });
  rethrow(lock);
  return task.stage() == AheadTask::Stage::kDone;
}

bool Engine::withdraw(int index, bool ticking) {
  if (in_forked_child()) return false;
  Lock lock(mutex_);
  return withdraw(lock, units_.at(index), ticking);
}

// With mutex_ held; lets it go while it waits.
bool Engine::withdraw(Lock& lock, Unit& unit, bool ticking) {
  const auto at_rest = [&] {
    return unit.measure.stage() != AheadTask::Stage::kRunning &&
           unit.ahead.stage() != AheadTask::Stage::kRunning;
  };
  if (ticking) {
    tick_until(lock, at_rest);
  } else {
    begin_wait(kAnyUnit);
    changed_.wait(lock, at_rest);
    --num_waiting_;
  }
  const bool started = unit.ahead.started();
  if (started) ++counters_.withdrawn;
  unit.measure.withdraw();
  unit.ahead.withdraw();
  return started;
}

void Engine::rest_ahead(int index) {
  if (in_forked_child()) return;
  Lock lock(mutex_);
  Unit& unit = units_.at(index);
  for (AheadTask* task : {&unit.measure, &unit.ahead}) {
    if (!task->started()) task->withdraw();
    tick_until(lock, [&] { return task->stage() != AheadTask::Stage::kRunning; });
  }
}

bool Engine::keep_ahead(int index) {
  if (in_forked_child()) return false;
  Lock lock(mutex_);
  Unit& unit = units_.at(index);
  if (unit.ahead.started()) return true;
  withdraw(lock, unit, /*ticking=*/false);
  return false;
}

// With mutex_ held. What has to be true before a unit's state may say that it is being updated.
void Engine::ready_to_commit(Lock& lock, int index) {
  rethrow(lock);
  Unit& unit = units_.at(index);
  require(unit.users == 0, "autohete: step() inside the forward of unit ", unit.blocks.name,
          "; call it after the forward and backward have returned");
  wait(lock, &EngineCounters::wait_update_seconds, index, [&] {
    return unit.state.parameters_final() && unit.state.residency != Residency::kUploading;
  });
  rethrow(lock);
  if (unit.state.residency == Residency::kResident) drop(unit);
  unit.given_out = false;
}

void Engine::commit(int index, std::function<void()> update, std::size_t num_parameters) {
  refuse_training_in_child();
  Lock lock(mutex_);
  ready_to_commit(lock, index);
  Unit& unit = units_[index];
  withdraw(lock, unit, /*ticking=*/false);
  unit.update = std::move(update);
  unit.update_always = true;
  unit.num_parameters = num_parameters;
  advance(unit, UnitEvent::kCommit);
  if (unit.state.progress == Progress::kUpdating) start_update(index);
}

void Engine::commit_ahead(int index, BlockPtr params_host, std::function<void()> again,
                          bool always) {
  refuse_training_in_child();
  Lock lock(mutex_);
  ready_to_commit(lock, index);
  Unit& unit = units_[index];
  AH_ASSERT(unit.ahead.started() && unit.state.progress == Progress::kLanded);
  const bool done = unit.ahead.stage() == AheadTask::Stage::kDone && !always;
  unit.blocks.params_host = std::move(params_host);
  ++counters_.updates_ahead;
  advance(unit, UnitEvent::kCommit);
  if (!done) {  // the CPU lane finishes the one, then looks at the other
    unit.update = std::move(again);
    unit.update_always = always;
    return start_update(index);
  }
  updated(index);
}

void Engine::share_after_update(int index, std::function<void()> share) {
  refuse_training_in_child();
  Lock lock(mutex_);
  rethrow(lock);
  Unit& unit = units_.at(index);
  wait(lock, &EngineCounters::wait_update_seconds, index,
       [&] { return unit.state.parameters_final(); });
  rethrow(lock);
  if (!share_lane_) share_lane_ = std::make_unique<InOrderLane>();
  unit.share = std::move(share);
  share_lane_->expect(index);
}

// With mutex_ held.
void Engine::start_update(int index) {
  if (stopping_) return;  // a copy that ended while the engine does: its lane is gone
  const auto priority = static_cast<std::uint64_t>(units_.size()) + update_priority(index);
  update_lane_->push(rank(priority), [this, index](UpdateLane& lane) { run_update(lane, index); });
}

// On the CPU lane's thread.
void Engine::run_update(UpdateLane& lane, int index) {
  std::function<void()> update;
  std::size_t num_parameters = 0;
  {
    Lock lock(mutex_);
    Unit& unit = units_[index];
    if (unit.ahead.stage() == AheadTask::Stage::kRunning) {  // it gives way to this
      unit.update_waits = true;
      return;
    }
    update = std::move(unit.update);
    if (unit.ahead.stage() == AheadTask::Stage::kDone && !unit.update_always) update = nullptr;
    // What only checks an update that has run ahead takes no update's time.
    if (unit.ahead.stage() != AheadTask::Stage::kDone) num_parameters = unit.num_parameters;
  }
  std::exception_ptr error;
  if (update) error = take_turn(lane, index, "update", num_parameters, std::move(update));
  Lock lock(mutex_);
  if (error) fail(error);
  updated(index);
}

// With mutex_ held. This rank's part of the unit is new.
void Engine::updated(int index) {
  if (units_[index].share && !error_ && !stopping_) {
    share_lane_->ready(index, [this, index] { run_share(index); });
    return;
  }
  finish_update(index);
  notify(index);
}

// On the share lane's thread.
void Engine::run_share(int index) {
  std::function<void()> share;
  {
    Lock lock(mutex_);
    share = std::exchange(units_[index].share, nullptr);
  }
  std::exception_ptr error;
  try {
    share();
  } catch (...) {
    error = std::current_exception();
  }
  share = nullptr;
  Lock lock(mutex_);
  if (error) fail(error);
  finish_update(index);
  notify(index);
}

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

// With mutex_ held. The host block holds the new parameters.
void Engine::finish_update(int index) {
  Unit& unit = units_[index];
  unit.measure.withdraw();
  unit.ahead.withdraw();
  advance(unit, UnitEvent::kUpdateDone);
  ++counters_.updates;
  if (stopping_) return;
  if (offloaded(unit)) {
    prefetch();
  } else {
    start_upload(index, static_cast<std::uint64_t>(index));
  }
}

}  // namespace autohete
