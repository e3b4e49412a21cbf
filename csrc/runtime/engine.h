// The execution engine: moves units' parameters and gradients, runs their updates, and lets the
// next forward of unit k wait for unit k alone.
//
// It knows blocks and units, not tensors: bindings point the user's tensors at the blocks that
// acquire(), release() and settle() return.
//
// Threads: the public methods are called from one thread, the one that runs the hooks (the "hook
// thread"); they may block, so callers drop the GIL. Lanes call back on threads of their own.
// mutex_ guards all members that say so.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/device/device.h"
#include "csrc/device/store.h"
#include "csrc/kernels/adamw.h"
#include "csrc/plan/order.h"
#include "csrc/plan/plan.h"
#include "csrc/runtime/ahead_task.h"
#include "csrc/runtime/in_order_lane.h"
#include "csrc/runtime/timeline.h"
#include "csrc/runtime/transfer.h"
#include "csrc/runtime/unit_state.h"
#include "csrc/runtime/update_lane.h"

namespace autohete {

// The blocks of one unit. Which exist follows from its UnitPlan:
//   parameters on the host:       params_host
//   parameters on the device:     params_device; and params_host when the optimizer state is on
//                                 the host (the update writes there, one copy refreshes the device)
//   optimizer state on the host:  gradients_host
// Masters and moments are the bindings' own blocks: the engine only sees them in AdamSpans.
struct UnitBlocks {
  std::string name;
  UnitPlan plan;
  std::size_t param_bytes = 0;
  std::vector<std::size_t> param_offsets;  // of each parameter in its block, ascending
  BlockPtr params_host, params_device, gradients_host;
};

struct EngineOptions {
  int window = 2;  // device slots for parameters that live on the host, the largest unit's size,
                   // the second largest's, ...
  std::size_t chunk_bytes = std::size_t{4} << 20;
  // How other systems order the same work, to race them on the same lanes.
  bool priority_order = true;      // false: first in, first out on every lane
  bool synchronous_moves = false;  // nothing is copied beside compute: no prefetch, sends wait
  bool aggregate = true;           // false: an upload is a copy per parameter, not one per unit
};

// Work on a unit's gradients that need not wait for step(). Both may be empty; both run on the CPU
// lane's thread once the gradients have landed, unless withdrawn before. What they throw is dropped
// with them: step() does the work again and reports it.
struct AheadWork {
  std::function<void()> measure;   // reads the gradients; before any update
  std::function<void()> update;    // writes only where nobody looks before commit() says so
  std::size_t num_parameters = 0;  // as for commit()
};

struct EngineCounters {
  std::uint64_t h2d_bytes = 0, d2h_bytes = 0;
  std::uint64_t updates = 0;
  std::uint64_t updates_ahead = 0;  // of these: done before step()
  std::uint64_t withdrawn = 0;      // updates ahead that had run, or were running, for nothing
  std::uint64_t slot_misses = 0;    // acquire found no free slot: the device read host memory
  double wait_update_seconds = 0, wait_upload_seconds = 0, wait_gradients_seconds = 0;
};

class Engine {
 public:
  // Both outlive the engine.
  Engine(Device& device, Store& store);
  ~Engine();  // drops what has not started, finishes what has, joins; under 5 s
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Replaces all units and slots. Call with nothing in flight (after synchronize()).
  // Throws OutOfMemory when the slots do not fit the device.
  void configure(std::vector<UnitBlocks> units, EngineOptions options);

  // Called every tenth of a second while a method waits, without the lock; may throw to end the
  // wait (the user's interrupt). Set before the first wait.
  void set_wait_tick(std::function<void()> tick) { wait_tick_ = std::move(tick); }

  // 0 until configured.
  int num_units();

  // Makes the unit's parameters usable by the device and returns the block to point at. Waits for
  // this unit's update and upload alone, then starts the uploads that come next in `direction`.
  // Every acquire needs one release.
  BlockPtr acquire(int unit, Direction direction);
  // Returns the block that holds the newest bytes from now on. `edited`: the device wrote to the
  // parameters in between, so they are copied back to the host first.
  BlockPtr release(int unit, bool edited);

  // Waits until nothing writes the unit's parameters, forgets device copies that could become
  // old when the caller edits them, and returns the block that holds the newest bytes. The unit is
  // the caller's from here on, no lane starts to read it, until acquire(), commit() or
  // take_back().
  BlockPtr settle(int unit);
  // The caller will settle() again before the next touch: all units may be uploaded ahead again.
  void take_back();

  // Starts copying gradients to the host; waits for an update of the unit that still reads the last
  // ones. Each dst must lie in the unit's gradients_host; sources
  // stay valid until the copy is over. `ahead` takes the place of earlier work ahead of the unit's.
  // `more`: the unit's gradients go in parts, and the next call brings another; they are leaving
  // until the last part, which `more` is off for, is there. Each part has its own share of the
  // update ahead, which may begin when that part has landed; the last one's `measure` is of all.
  void send_gradients(int unit, std::vector<CopySegment> segments, AheadWork ahead = {},
                      bool more = false);
  bool gradients_landed(int unit);
  void wait_gradients(int unit);
  // Waits until fewer than `count` units' gradients are leaving, not counting those of which more
  // parts are to come.
  void wait_gradients_below(int count);

  // --- ahead of step(); see docs/adr/0008-updates-ahead-of-step.md
  // Waits for the last send's `measure`. False where there is none any more.
  bool wait_measured(int unit);
  // Forgets the unit's work ahead; waits for what is running.
  // Returns whether an update had started: what it wrote is void. Where the wait tick throws,
  // nothing was forgotten; `ticking`: false where that would leave a step half done.
  bool withdraw(int unit, bool ticking = true);
  // Waits until no work ahead reads the unit's gradients, which have landed; withdraws what has not
  // started.
  void rest_ahead(int unit);
  // For commit(): true when the unit's `ahead.update` has begun, or its gradients are leaving in
  // parts; otherwise withdraws.
  bool keep_ahead(int unit);

  // Queues the update of one unit and returns. It starts when its gradients have landed; the
  // parameters are final again when it is done and, where they live on the device, uploaded.
  // `update` does the arithmetic (on the CPU lane's thread).
  // `num_parameters` matters to set_update_rate() alone.
  void commit(int unit, std::function<void()> update, std::size_t num_parameters = 0);
  // The same where keep_ahead() said true: what ran ahead holds from here on. `params_host` is the
  // block it writes the parameters to, the unit's own from now on. `again` does the same work, for
  // the case that it fails ahead; with `always` it is called in any case, to check and mend.
  void commit_ahead(int unit, BlockPtr params_host, std::function<void()> again, bool always);
  // The unit's next update is followed by `share`, on a thread that takes units in the order of
  // these calls; the parameters are final after it. For ranks that update a part of the unit each.
  // What it throws ends the engine's work. Call before commit().
  void share_after_update(int unit, std::function<void()> share);
  // Joins the lanes' threads early, where the caller holds what a running `share` needs.
  void stop();
  // step() is over: the next traversal is a forward from unit 0; starts its first uploads.
  void begin_iteration();
  // The iteration barrier of other systems: waits until no update and no upload is left.
  void wait_idle();
  // Called by an update that runs, where it can be interrupted, having written `num_parameters`
  // since the last time: more urgent work that has come meanwhile is done first.
  void give_way(std::size_t num_parameters);
  // Makes the CPU lane as slow as a stated rate: an update of n parameters takes at least n / rate
  // seconds, less what the system woke it too late for the one before (0: as fast as it is). For
  // races against a CPU that is not here.
  void set_update_rate(double parameters_per_second) { update_rate_ = parameters_per_second; }

  // Waits for everything. Rethrows the first failure of any lane.
  void synchronize();
  // Rethrows the first failure of any lane, if there was one; the engine does not recover from it.
  void check();
  // Ends every acquire that has no release yet: a forward or backward was left by an exception.
  void abandon();

  UnitState state(int unit);
  EngineCounters counters();
  Timeline& timeline() { return timeline_; }

 private:
  struct Slot {
    BlockPtr block;
    int unit = -1;   // whose bytes it holds or is about to hold
    Event last_use;  // the device is done with it after this
  };
  struct Unit {
    UnitBlocks blocks;
    UnitState state;
    int users = 0;           // acquires without release
    int slot = -1;           // index into slots_, or -1
    bool given_out = false;  // settled: the user may be writing to it
    bool touched = false;    // settled since the last upload: kernels may be reading or writing it
    Event last_use;          // of a device block that is not a slot
    std::function<void()> update;
    std::function<void()> share;
    bool update_always = true;       // also where the update has run ahead
    bool update_waits = false;       // for the update ahead, which has begun
    std::size_t num_parameters = 0;  // that an update writes
    bool more_gradients = false;     // parts that have not been sent yet; only while leaving
    int parts_leaving = 0;           // of its gradients
    AheadTask measure, ahead;
  };
  // What the CPU lane does now. Where it gives way, its time has a gap.
  struct Turn {
    UpdateLane& lane;
    int unit;
    const char* what;
    std::size_t num_parameters;  // still to be written, from this part on
    double start_seconds;        // of this part
    std::size_t written = 0;     // in this part
  };
  using Lock = std::unique_lock<std::mutex>;
  static constexpr int kAnyUnit = -1;

  bool offloaded(const Unit& unit) const { return unit.blocks.plan.parameters == Tier::kHost; }
  BlockPtr newest_block(const Unit& unit) const;
  BlockPtr device_block(const Unit& unit) const;
  template <typename Predicate>
  void tick_until(Lock& lock, Predicate ready, int awaited = kAnyUnit);
  template <typename Predicate>
  void wait_ticking(Lock& lock, Predicate ready, int awaited = kAnyUnit);
  template <typename Predicate>
  void wait(Lock& lock, double EngineCounters::* cause, int unit, Predicate ready);
  template <typename Predicate>
  void wait_for(Lock& lock, int awaited, double EngineCounters::* cause, int unit, Predicate ready);
  void begin_wait(int awaited);
  void notify(int unit);
  bool take_slot(int unit);
  BlockPtr take_former_slot(std::size_t bytes);
  void drop(Unit& unit);
  std::vector<CopySegment> upload_segments(const Unit& unit) const;
  void start_upload(int unit, std::uint64_t priority);
  void prefetch();
  void start_update(int unit);
  void bring_home(Lock& lock, int unit, const Event& after);
  bool in_forked_child() const;
  void refuse_training_in_child() const;
  void run_update(UpdateLane& lane, int unit);
  void updated(int unit);
  void run_share(int unit);
  void finish_update(int unit);
  void ready_to_commit(Lock& lock, int unit);
  void part_landed(int unit, std::uint64_t measure, std::uint64_t ahead);
  void queue_ahead(int unit, AheadTask Unit::* task, std::uint64_t ticket);
  void run_ahead(UpdateLane& lane, int unit, AheadTask Unit::* task, std::uint64_t ticket);
  std::exception_ptr take_turn(UpdateLane& lane, int unit, const char* what,
                               std::size_t num_parameters, std::function<void()> work);
  void end_part(Turn& turn);
  void make_way(Turn& turn);
  void record(const Turn& turn);
  void advance(Unit& unit, UnitEvent event);  // the table's, and what is counted of it
  bool withdraw(Lock& lock, Unit& unit, bool ticking);
  std::uint64_t rank(std::uint64_t priority) const {
    return options_.priority_order ? priority : 0;
  }
  void fail(std::exception_ptr error);
  void rethrow(Lock& lock);

  std::function<void()> wait_tick_;
  Device& device_;
  Store& store_;
  const pid_t owner_process_;  // threads do not follow into a forked child: it only reads
  Timeline timeline_;

  std::mutex mutex_;  // guards everything below except the lanes, which lock themselves
  std::condition_variable changed_;
  int num_waiting_ = 0;     // threads that wait for changed_, and
  int awaited_ = kAnyUnit;  // for what: to wake one for nothing costs a lane more than its own work
  std::vector<Unit> units_;
  std::vector<Slot> slots_;
  std::vector<std::weak_ptr<Block>> former_slots_;  // of earlier plans
  int num_leaving_ = 0;                             // units whose gradients are on their way
  int num_unsent_ = 0;                              // of these: with more_gradients
  EngineCounters counters_;
  std::exception_ptr error_;
  Direction direction_ = Direction::kForward;
  int position_ = -1;             // the unit acquired last in this direction
  std::atomic<int> waiting_{-1};  // the unit that acquire() waits for: its slot is not given away
  bool stopping_ = false;
  std::size_t chunk_bytes_ = 0;  // of the lanes; hook thread only
  EngineOptions options_;
  std::atomic<double> update_rate_{0};
  // CPU lane's thread only:
  Turn* turn_ = nullptr;
  double overslept_ = 0;    // at a stated rate: by how much the last wait was too long,
  double woken_at_ = 0;     // when it ended,
  double woken_after_ = 0;  // and what the thread had computed by then, in seconds

  // Lanes last: they stop first, so no callback meets a dead member.
  std::unique_ptr<TransferLane> upload_lane_, download_lane_;
  std::unique_ptr<InOrderLane> share_lane_;  // made when it is needed
  std::unique_ptr<UpdateLane> update_lane_;
};

}  // namespace autohete
