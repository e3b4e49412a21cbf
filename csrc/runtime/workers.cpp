#include "csrc/runtime/workers.h"

#include <oneapi/tbb/task_arena.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/cpu_count.h"

namespace autohete {
namespace {

using Body = std::function<void(std::size_t)>;

// Tiles [begin, end), claimed one by one in their order. A cache line of its own.
struct alignas(64) Run {
  std::atomic<std::size_t> next{0};
  std::size_t end = 0;
};

// One call of for_each_tile. Helpers that start after the call has returned find no tile left and
// never touch the body, which is gone by then; they share ownership of the job itself.
//
// Each thread has a run of neighbouring tiles for its own, and goes on in the others' when that is
// done: what the hardware reads ahead behind a tile's end is then its own next tile (measured: 10
// to 15 % of an update from memory).
class Job {
 public:
  Job(std::size_t num_tiles, std::size_t num_runs, const Body& body)
      : num_tiles_(num_tiles), runs_(num_runs), body_(&body) {
    for (std::size_t i = 0; i < num_runs; ++i) {
      runs_[i].next = num_tiles * i / num_runs;
      runs_[i].end = num_tiles * (i + 1) / num_runs;
    }
  }

  // Claims and runs tiles until none is left.
  void work() {
    const std::size_t own = threads_.fetch_add(1);
    for (std::size_t i = 0; i < runs_.size(); ++i) work_in(runs_[(own + i) % runs_.size()]);
  }

  void wait_and_rethrow() {
    for (std::size_t done; (done = finished_.load()) < num_tiles_;) finished_.wait(done);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void work_in(Run& run) {
    // Looked at before it is claimed from: of many threads all pass by all runs in the end.
    while (run.next.load(std::memory_order_relaxed) < run.end) {
      const std::size_t tile = run.next.fetch_add(1);
      if (tile >= run.end) return;
      try {
        (*body_)(tile);
      } catch (...) {
        give_up(std::current_exception());
      }
      finish(1);
    }
  }

  // Keeps the first error and withdraws the tiles that nobody has claimed.
  void give_up(std::exception_ptr error) {
    {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = error;
    }
    for (Run& run : runs_) {
      const std::size_t claimed = run.next.exchange(run.end);
      if (claimed < run.end) finish(run.end - claimed);
    }
  }

  void finish(std::size_t tiles) {
    if (finished_.fetch_add(tiles) + tiles == num_tiles_) finished_.notify_all();
  }

  const std::size_t num_tiles_;
  std::vector<Run> runs_;
  const Body* const body_;
  std::atomic<std::size_t> threads_{0};
  std::atomic<std::size_t> finished_{0};
  std::mutex mutex_;  // guards error_ until every tile has finished
  std::exception_ptr error_;
};

}  // namespace

int default_num_workers() {
  return cpus_for_rank(affinity_cpus(), cgroup_cpu_quota(), std::getenv("LOCAL_WORLD_SIZE"));
}

struct Workers::Impl {
  int num_workers;
  pid_t owner;  // oneTBB's threads exist in this process only
  // One slot is kept for callers, who never enter the arena: they claim tiles on their own stack.
  std::unique_ptr<tbb::task_arena> arena;
};

Workers::Workers(int num_workers) {
  require(num_workers >= 1, "Workers: num_workers is ", num_workers,
          ", expected at least 1; use default_num_workers()");
  impl_ = std::make_unique<Impl>();
  impl_->num_workers = num_workers;
  impl_->owner = getpid();
  if (num_workers > 1) impl_->arena = std::make_unique<tbb::task_arena>(num_workers, 1);
}

Workers::~Workers() {
  // In a forked child the arena's threads are gone; taking it down would wait for them.
  if (impl_->arena && getpid() != impl_->owner) impl_->arena.release();
}

int Workers::num_workers() const { return impl_->num_workers; }

void Workers::for_each_tile(std::size_t num_tiles, const Body& body) {
  if (num_tiles <= 1 || !impl_->arena || getpid() != impl_->owner) {
    for (std::size_t tile = 0; tile < num_tiles; ++tile) body(tile);
    return;
  }
  const std::size_t threads = std::min<std::size_t>(impl_->num_workers, num_tiles);
  const auto job = std::make_shared<Job>(num_tiles, threads, body);
  for (std::size_t i = 1; i < threads; ++i) impl_->arena->enqueue([job] { job->work(); });
  job->work();
  job->wait_and_rethrow();
}

}  // namespace autohete
