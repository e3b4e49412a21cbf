// The CPU lane: one thread that takes updates, smallest unit first, and runs each on all workers.
// Large ones let more urgent ones pass between their pieces.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>

#include "csrc/runtime/lane_thread.h"

namespace autohete {

// Any thread may push. A job runs on the lane's thread and must not throw. The destructor drops
// what has not started and joins.
class UpdateLane {
 public:
  // Queues `job`; smaller priorities run first, equal ones in order of submission.
  using Job = std::function<void(UpdateLane&)>;
  void push(std::uint64_t priority, Job job);

  // For the job that runs, where it can be interrupted: whether a more urgent one waits, and to run
  // those. Nested at most as deep as there are priorities.
  bool has_more_urgent();
  void give_way();
  // The same while the job only passes time: returns whether a more urgent one came before `end`.
  bool wait_for_more_urgent(std::chrono::steady_clock::time_point end);

 private:
  bool more_urgent() const;
  void run_first(LaneThread::Lock& lock);

  // With the thread's lock:
  std::multimap<std::uint64_t, Job> queue_;
  std::uint64_t running_ = 0;  // the priority of the job that runs
  LaneThread thread_{[this] { return !queue_.empty(); },
                     [this](LaneThread::Lock& lock) { run_first(lock); }};
};

}  // namespace autohete
