// From a unit's gradients to its new parameters: leaving, work ahead of step(), updates, shares.
#include <functional>
#include <utility>

#include "csrc/runtime/engine.h"
#include "csrc/runtime/engine_wait.h"

namespace autohete {

void Engine::send_gradients(int index, std::vector<CopySegment> segments, AheadWork ahead,
                            bool more) {
  refuse_training_in_child();
  Lock lock(mutex_);
  Unit& unit = units_.at(index);
  AH_ASSERT(unit.blocks.gradients_host != nullptr);
  if (!unit.more_gradients) {
    wait(lock, &EngineCounters::wait_update_seconds, index,
         [&] { return unit.state.parameters_final(); });
    // Some that were on the host already, say, and have been replaced since.
    wait(lock, &EngineCounters::wait_gradients_seconds, index,
         [&] { return unit.state.progress != Progress::kLeaving; });
    rethrow(lock);
    withdraw(lock, unit, /*ticking=*/false);
    unit.num_parameters = 0;
    advance(unit, UnitEvent::kGradientsReady);
  } else if (!unit.ahead.offered()) {
    ahead.update = nullptr;  // withdrawn since the first part: the rest alone is no update
  }
  num_unsent_ += static_cast<int>(more) - static_cast<int>(unit.more_gradients);
  unit.more_gradients = more;
  unit.num_parameters += ahead.num_parameters;
  const std::uint64_t measure = unit.measure.offer(std::move(ahead.measure));
  const std::uint64_t update = unit.ahead.offer(std::move(ahead.update), ahead.num_parameters);
  if (!more) unit.measure.offer_no_more(), unit.ahead.offer_no_more();
  ++unit.parts_leaving;
  std::size_t bytes = 0;
  for (const CopySegment& segment : segments) bytes += segment.bytes;
  CopyJob job;
  job.segments = std::move(segments);
  job.priority = rank(gradient_priority(index));
  job.unit = index;
  job.after = device_.record(kComputeStream);
  job.done = [this, index, bytes, measure, update](std::exception_ptr error) {
    Lock inner(mutex_);
    if (error) fail(error);
    counters_.d2h_bytes += bytes;
    part_landed(index, measure, update);
  };
  download_lane_->submit(std::move(job));
  if (options_.synchronous_moves && !more)
    wait(lock, &EngineCounters::wait_gradients_seconds, index,
         [&] { return unit.state.progress != Progress::kLeaving; });
}

// With mutex_ held. The tickets of its work ahead.
void Engine::part_landed(int index, std::uint64_t measure, std::uint64_t ahead) {
  Unit& unit = units_[index];
  const bool all = --unit.parts_leaving == 0 && !unit.more_gradients;
  if (all) advance(unit, UnitEvent::kGradientsLanded);
  queue_ahead(index, &Unit::measure, measure);
  queue_ahead(index, &Unit::ahead, ahead);
  if (all && unit.state.progress == Progress::kUpdating) start_update(index);
  notify(index);
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
  wait(lock, &EngineCounters::wait_gradients_seconds, -1,
       [&] { return num_leaving_ - num_unsent_ < count; });
  rethrow(lock);
}

// With mutex_ held. A part that was offered has its gradients: the CPU lane may have it.
void Engine::queue_ahead(int index, AheadTask Unit::* task, std::uint64_t ticket) {
  if (stopping_ || !(units_[index].*task).land(ticket)) return;
  // Norms first. An update ahead is as urgent as the unit's own: it becomes that.
  const std::uint64_t norms_first = task == &Unit::ahead ? units_.size() : 0;
  update_lane_->push(rank(norms_first + update_priority(index)),
                     [=, this](UpdateLane& lane) { run_ahead(lane, index, task, ticket); });
}

// On the CPU lane's thread.
void Engine::run_ahead(UpdateLane& lane, int index, AheadTask Unit::* task, std::uint64_t ticket) {
  AheadTask::Started part;
  {
    Lock lock(mutex_);
    if (index < static_cast<int>(units_.size())) part = (units_[index].*task).start(ticket);
  }
  if (!part.work) return;
  const char* what = task == &Unit::ahead ? "update ahead" : "norm";
  const std::exception_ptr error =
      take_turn(lane, index, what, part.num_parameters, std::move(part.work));
  Lock lock(mutex_);
  Unit& unit = units_[index];
  (unit.*task).finish(!error);
  const bool parts_left = unit.ahead.running() || (unit.ahead.offered() && !unit.ahead.done());
  if (parts_left || !std::exchange(unit.update_waits, false)) return notify(index);
  if (!unit.ahead.done() || unit.update_always) {
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
  wait(lock, &EngineCounters::wait_gradients_seconds, index,
       [&] { return !task.offered() || task.done(); });
  rethrow(lock);
  return task.done();
}

bool Engine::withdraw(int index, bool ticking) {
  if (in_forked_child()) return false;
  Lock lock(mutex_);
  return withdraw(lock, units_.at(index), ticking);
}

// With mutex_ held; lets it go while it waits.
bool Engine::withdraw(Lock& lock, Unit& unit, bool ticking) {
  const auto at_rest = [&] { return !unit.measure.running() && !unit.ahead.running(); };
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
    if (!task->started() && !task->running()) task->withdraw();
    tick_until(lock, [&] { return !task->running() && (!task->started() || task->done()); });
  }
}

bool Engine::keep_ahead(int index) {
  if (in_forked_child()) return false;
  Lock lock(mutex_);
  Unit& unit = units_.at(index);
  const bool in_parts = unit.ahead.offered() && unit.ahead.num_parts() > 1;
  if (unit.ahead.started() || (in_parts && unit.state.progress == Progress::kLeaving)) return true;
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
  AH_ASSERT(unit.state.progress == Progress::kLanded || unit.state.progress == Progress::kLeaving);
  // Not while gradients that no update needs are on their way, or the unit's norms are taken.
  const bool over = unit.state.progress == Progress::kLanded && !unit.measure.pending();
  const bool done = unit.ahead.done() && over && !always;
  unit.blocks.params_host = std::move(params_host);
  ++counters_.updates_ahead;
  advance(unit, UnitEvent::kCommit);
  if (done) return updated(index);
  // The CPU lane finishes the one, then looks at the other.
  unit.update = std::move(again);
  unit.update_always = always;
  if (unit.state.progress == Progress::kUpdating) start_update(index);
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
    // It gives way to this; parts that nobody has begun are in the lane's queue.
    if (unit.ahead.running() || (unit.ahead.offered() && !unit.ahead.done())) {
      unit.update_waits = true;
      return;
    }
    update = std::move(unit.update);
    if (unit.ahead.done() && !unit.update_always) update = nullptr;
    // What only checks an update that has run ahead takes no update's time.
    if (!unit.ahead.done()) num_parameters = unit.num_parameters;
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
