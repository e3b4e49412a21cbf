// Who may use a unit, and where its parameters are. What becomes of gradients: engine_updates.cpp.
#include "csrc/runtime/engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/runtime/engine_wait.h"

namespace autohete {

Engine::Engine(Device& device, Store& store)
    : device_(device), store_(store), owner_process_(getpid()) {}

bool Engine::in_forked_child() const { return getpid() != owner_process_; }

Engine::~Engine() { stop(); }

void Engine::stop() {
  {
    Lock lock(mutex_);
    stopping_ = true;
  }
  // Updates first: a running one may still submit an upload; then no lane has a customer left.
  update_lane_.reset();
  share_lane_.reset();
  download_lane_.reset();
  upload_lane_.reset();
}

void Engine::configure(std::vector<UnitBlocks> units, EngineOptions options) {
  require(options.window >= 1, "Engine: window is ", options.window, ", expected at least 1");
  synchronize();
  options_ = options;
  for (const Slot& slot : slots_) former_slots_.push_back(slot.block);
  slots_.clear();
  units_.clear();
  num_leaving_ = num_unsent_ = 0;
  std::vector<std::size_t> sizes;
  for (UnitBlocks& blocks : units) {
    Unit unit;
    unit.blocks = std::move(blocks);
    if (offloaded(unit)) {
      sizes.push_back(std::max(unit.blocks.param_bytes, kBlockAlignment));
    } else {
      unit.state.residency = Residency::kResident;
    }
    units_.push_back(std::move(unit));
  }
  // As large as the largest units: whichever are here at once, they find slots. Kernels queued
  // earlier may still use memory that the allocator has given again.
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  sizes.resize(std::min(sizes.size(), static_cast<std::size_t>(options.window)));
  for (const std::size_t bytes : sizes) {
    BlockPtr block = take_former_slot(bytes);
    if (!block) block = store_.allocate_device(bytes, "a parameter slot");
    slots_.push_back(Slot{std::move(block), -1, device_.record(kComputeStream)});
  }
  std::erase_if(former_slots_, [](const auto& slot) { return slot.expired(); });
  if (!upload_lane_ || options.chunk_bytes != chunk_bytes_) {
    upload_lane_ = std::make_unique<TransferLane>(device_, CopyDirection::kHostToDevice,
                                                  options.chunk_bytes, &timeline_);
    download_lane_ = std::make_unique<TransferLane>(device_, CopyDirection::kDeviceToHost,
                                                    options.chunk_bytes, &timeline_);
    chunk_bytes_ = options.chunk_bytes;
  }
  if (!update_lane_) update_lane_ = std::make_unique<UpdateLane>();
  position_ = -1;
  direction_ = Direction::kForward;
}

// One of an earlier plan that is there still, since somebody knows it by address and keeps it: of
// those too there are no more than the plans' slots, however often plans change.
BlockPtr Engine::take_former_slot(std::size_t bytes) {
  for (std::weak_ptr<Block>& former : former_slots_) {
    BlockPtr block = former.lock();
    if (!block || block->bytes() != bytes) continue;
    former.reset();
    return block;
  }
  return nullptr;
}

void Engine::refuse_training_in_child() const {
  if (in_forked_child())
    throw std::runtime_error(
        "autohete: this process was forked from the one that trains, and the engine's threads "
        "stayed "
        "there; evaluate here, or wrap a model of this process's own");
}

int Engine::num_units() {
  Lock lock(mutex_);
  return static_cast<int>(units_.size());
}

BlockPtr Engine::newest_block(const Unit& unit) const {
  return offloaded(unit) ? unit.blocks.params_host : unit.blocks.params_device;
}

BlockPtr Engine::device_block(const Unit& unit) const {
  return unit.slot >= 0 ? slots_[unit.slot].block : unit.blocks.params_device;
}

void Engine::advance(Unit& unit, UnitEvent event) {
  num_leaving_ -= unit.state.progress == Progress::kLeaving ? 1 : 0;
  autohete::advance(unit.state, event);
  num_leaving_ += unit.state.progress == Progress::kLeaving ? 1 : 0;
}

BlockPtr Engine::acquire(int index, Direction direction) {
  if (in_forked_child()) return newest_block(units_.at(index));
  Lock lock(mutex_);
  Unit& unit = units_.at(index);
  if (unit.users > 0) {
    ++unit.users;
    return device_block(unit) ? device_block(unit) : newest_block(unit);
  }
  rethrow(lock);
  unit.given_out = false;
  position_ = index;
  waiting_ = index;
  direction_ = direction;
  const auto done = std::unique_ptr<std::atomic<int>, void (*)(std::atomic<int>*)>(
      &waiting_, [](std::atomic<int>* unit) { *unit = -1; });
  wait(lock, &EngineCounters::wait_update_seconds, index,
       [&] { return unit.state.parameters_final(); });
  rethrow(lock);
  if (unit.state.residency == Residency::kHost && offloaded(unit)) {
    // Slots on their way to other units (the module order changed) become free to take in time.
    const auto slot_in = [&](Residency residency) {
      return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
        return slot.unit >= 0 && units_[slot.unit].state.residency == residency &&
               slot.block->bytes() >= unit.blocks.param_bytes;
      });
    };
    while (!take_slot(index) && slot_in(Residency::kUploading)) {
      wait_for(lock, kAnyUnit, &EngineCounters::wait_upload_seconds, index,
               [&] { return slot_in(Residency::kResident); });
      rethrow(lock);
    }
    if (unit.slot < 0) {
      // All slots are computing (units nested in each other). The device can read the host block.
      ++counters_.slot_misses;
      ++unit.users;
      return newest_block(unit);
    }
    start_upload(index, 0);
  }
  prefetch();
  wait(lock, &EngineCounters::wait_upload_seconds, index,
       [&] { return unit.state.residency == Residency::kResident; });
  rethrow(lock);
  advance(unit, UnitEvent::kAcquired);
  unit.users = 1;
  return device_block(unit);
}

BlockPtr Engine::release(int index, bool edited) {
  if (in_forked_child()) return newest_block(units_.at(index));
  Lock lock(mutex_);
  Unit& unit = units_.at(index);
  if (unit.users == 0) return newest_block(unit);
  if (--unit.users > 0) return device_block(unit) ? device_block(unit) : newest_block(unit);
  if (unit.state.residency != Residency::kComputing) return newest_block(unit);  // a slot miss
  const Event last_use = device_.record(kComputeStream);
  if (edited && offloaded(unit)) bring_home(lock, index, last_use);
  advance(unit, UnitEvent::kReleased);
  unit.last_use = last_use;
  if (unit.slot >= 0) slots_[unit.slot].last_use = last_use;
  // In backward the next unit has been acquired already, when this one's slot was not free.
  if (index != position_) prefetch();
  return newest_block(unit);
}

// With mutex_ held. Rare: the module wrote to its own parameters, and the slot's bytes go home. The
// unit counts as computing until they are there, so nobody takes its slot.
void Engine::bring_home(Lock& lock, int index, const Event& after) {
  struct Arrival {
    bool home = false;
  };
  const auto arrival = std::make_shared<Arrival>();
  Unit& unit = units_[index];
  CopyJob job;
  job.segments = {
      {unit.blocks.params_host->data(), slots_[unit.slot].block->data(), unit.blocks.param_bytes}};
  job.unit = index;
  job.after = after;
  job.done = [this, arrival](std::exception_ptr failure) {
    Lock inner(mutex_);
    arrival->home = true;
    if (failure) fail(failure);
    notify(kAnyUnit);
  };
  lock.unlock();
  download_lane_->submit(std::move(job));
  lock.lock();
  wait_ticking(lock, [&] { return arrival->home; });
  rethrow(lock);
}

BlockPtr Engine::settle(int index) {
  if (in_forked_child()) return newest_block(units_.at(index));
  Lock lock(mutex_);
  Unit& unit = units_.at(index);
  unit.given_out = true;  // first: other units' updates end and prefetch while we wait
  wait(lock, &EngineCounters::wait_update_seconds, index, [&] {
    return unit.state.parameters_final() && unit.state.residency != Residency::kUploading &&
           (offloaded(unit) || unit.state.residency != Residency::kHost);
  });
  rethrow(lock);
  unit.touched = true;
  if (offloaded(unit) && unit.state.residency == Residency::kResident) drop(unit);
  return unit.users > 0 && device_block(unit) ? device_block(unit) : newest_block(unit);
}

void Engine::take_back() {
  Lock lock(mutex_);
  for (Unit& unit : units_) unit.given_out = false;
}

// With mutex_ held. Finds a slot that the unit fits in: the smallest that is free, or the one whose
// bytes are needed last.
bool Engine::take_slot(int index) {
  const int num_units = static_cast<int>(units_.size());
  const auto distance = [&](int unit) {
    return next_use_distance(direction_, position_, unit, num_units);
  };
  int best = -1;
  for (int i = 0; i < static_cast<int>(slots_.size()); ++i) {
    const int holder = slots_[i].unit;
    if (slots_[i].block->bytes() < units_[index].blocks.param_bytes) break;  // largest first
    if (holder < 0) {
      best = i;
      continue;
    }
    if (best >= 0 && slots_[best].unit < 0) continue;
    if (units_[holder].state.residency != Residency::kResident || holder == waiting_) continue;
    if (index != position_ && distance(holder) <= distance(index)) continue;
    if (best < 0 || distance(holder) > distance(slots_[best].unit)) best = i;
  }
  if (best < 0) return false;
  if (slots_[best].unit >= 0) drop(units_[slots_[best].unit]);
  slots_[best].unit = index;
  units_[index].slot = best;
  return true;
}

// With mutex_ held. The unit's device bytes are not to be used any more.
void Engine::drop(Unit& unit) {
  advance(unit, UnitEvent::kDropped);
  if (unit.slot < 0) return;
  slots_[unit.slot].unit = -1;
  unit.slot = -1;
}

// With mutex_ held.
std::vector<CopySegment> Engine::upload_segments(const Unit& unit) const {
  std::byte* to = device_block(unit)->data();
  const std::byte* from = unit.blocks.params_host->data();
  const std::size_t bytes = unit.blocks.param_bytes;
  if (options_.aggregate || unit.blocks.param_offsets.empty()) return {{to, from, bytes}};
  std::vector<CopySegment> segments;
  std::vector<std::size_t> ends = unit.blocks.param_offsets;
  ends.push_back(bytes);
  for (std::size_t i = 0; i + 1 < ends.size(); ++i)
    segments.push_back({to + ends[i], from + ends[i], ends[i + 1] - ends[i]});
  return segments;
}

// With mutex_ held.
void Engine::start_upload(int index, std::uint64_t priority) {
  Unit& unit = units_[index];
  advance(unit, UnitEvent::kUploadStarted);
  CopyJob job;
  job.segments = upload_segments(unit);
  job.merge = options_.aggregate;
  job.priority = rank(priority);
  job.unit = index;
  job.after = unit.slot >= 0 ? slots_[unit.slot].last_use : unit.last_use;
  // What the user's kernels still do to a touched unit comes first.
  if (std::exchange(unit.touched, false)) job.after = device_.record(kComputeStream);
  job.done = [this, index](std::exception_ptr error) {
    Lock lock(mutex_);
    if (error) fail(error);
    advance(units_[index], UnitEvent::kUploadDone);
    counters_.h2d_bytes += units_[index].blocks.param_bytes;
    notify(index);
  };
  upload_lane_->submit(std::move(job));
}

// With mutex_ held. Uploads what the traversal needs next, as far as slots are free or hold bytes
// that are needed later. Where two units more are here or on their way, the last slot's upload
// waits for the next one: to wake the lane for each would cost the hook thread as much again.
void Engine::prefetch() {
  constexpr int kSlotsForPairs = 4;
  if (options_.synchronous_moves) return;
  bool started = false, updating = false;
  const int num_units = static_cast<int>(units_.size());
  int position = position_;
  Direction direction = direction_;
  const int reach = static_cast<int>(slots_.size());
  // The unit that runs, or waits to, has a slot or wants one: those behind it must not be faster.
  int seen = position_ >= 0 && offloaded(units_[position_]) ? 1 : 0;
  for (int i = 0; i < 2 * num_units && seen < reach; ++i) {
    std::tie(direction, position) = next_position(direction, position, num_units);
    // Behind the end of backward comes the update: what is uploaded before it would be old.
    if (direction_ == Direction::kBackward && direction != Direction::kBackward) return;
    Unit& unit = units_[position];
    if (!offloaded(unit) || position == position_) continue;
    ++seen;
    if (unit.state.residency != Residency::kHost || unit.given_out || unit.users > 0) continue;
    if (!unit.state.parameters_final()) {  // its own update asks again when done
      updating = true;
      continue;
    }
    if (seen == reach && reach >= kSlotsForPairs && !started && !updating) return;
    if (!take_slot(position)) return;
    start_upload(position, static_cast<std::uint64_t>(seen));
    started = true;
  }
}

void Engine::begin_iteration() {
  if (in_forked_child()) return;
  Lock lock(mutex_);
  direction_ = Direction::kForward;
  position_ = -1;
  prefetch();
}

void Engine::wait_idle() {
  if (in_forked_child()) return;
  Lock lock(mutex_);
  wait(lock, &EngineCounters::wait_update_seconds, -1, [&] {
    return std::all_of(units_.begin(), units_.end(), [](const Unit& unit) {
      return unit.state.parameters_final() && unit.state.residency != Residency::kUploading;
    });
  });
  rethrow(lock);
}

// With mutex_ held. A second thread that waits makes everybody look at everything until nobody
// waits: who is left then may have begun with another unit in mind.
void Engine::begin_wait(int awaited) { awaited_ = num_waiting_++ == 0 ? awaited : kAnyUnit; }

// With mutex_ held. Something has become of the unit: who waits for it, or for any, looks.
void Engine::notify(int unit) {
  const bool for_others = num_waiting_ == 1 && awaited_ != kAnyUnit && awaited_ != unit;
  if (!for_others || unit == kAnyUnit || error_) changed_.notify_all();
}

// With mutex_ held.
void Engine::fail(std::exception_ptr error) {
  if (!error_) error_ = error;
}

void Engine::rethrow(Lock& lock) {
  AH_ASSERT(lock.owns_lock());
  if (error_) std::rethrow_exception(error_);
}

void Engine::check() {
  Lock lock(mutex_);
  rethrow(lock);
}

void Engine::synchronize() {
  if (in_forked_child()) return;
  Lock lock(mutex_);
  for (Unit& unit : units_) {
    if (unit.state.parameters_final()) withdraw(lock, unit, /*ticking=*/true);
  }
  wait_ticking(lock, [&] {
    return std::all_of(units_.begin(), units_.end(), [](const Unit& unit) {
      return unit.state.parameters_final() && unit.state.progress != Progress::kLeaving &&
             unit.state.residency != Residency::kUploading;
    });
  });
  rethrow(lock);
}

void Engine::abandon() {
  if (in_forked_child()) return;
  Lock lock(mutex_);
  for (Unit& unit : units_) {
    if (std::exchange(unit.users, 0) == 0) continue;
    if (unit.state.residency != Residency::kComputing) continue;
    advance(unit, UnitEvent::kReleased);
    unit.last_use = device_.record(kComputeStream);
    if (unit.slot >= 0) slots_[unit.slot].last_use = unit.last_use;
  }
}

UnitState Engine::state(int index) {
  Lock lock(mutex_);
  return units_.at(index).state;
}

EngineCounters Engine::counters() {
  Lock lock(mutex_);
  return counters_;
}

}  // namespace autohete
