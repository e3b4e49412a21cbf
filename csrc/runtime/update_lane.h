// The CPU lane: one thread that takes updates, smallest unit first, and runs each on all workers.
// Large ones let more urgent ones pass between their pieces.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace autohete {

// Any thread may push. A job runs on the lane's thread and must not throw. The destructor drops
// what has not started and joins.
class UpdateLane {
 public:
  UpdateLane();
  ~UpdateLane();
  UpdateLane(const UpdateLane&) = delete;
  UpdateLane& operator=(const UpdateLane&) = delete;

  // Queues `job`; smaller priorities run first, equal ones in order of submission.
  using Job = std::function<void(UpdateLane&)>;
  void push(std::uint64_t priority, Job job);

  // For the job that runs, where it can be interrupted: whether a more urgent one waits, and to run
  // those. Nested at most as deep as there are priorities.
  bool has_more_urgent();
  void give_way();

 private:
  void run();
  bool more_urgent() const { return !stop_ && !queue_.empty() && queue_.begin()->first < running_; }
  void run_first(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;  // guards all below but thread_
  std::condition_variable changed_;
  std::multimap<std::uint64_t, Job> queue_;
  std::uint64_t running_ = 0;  // the priority of the job that runs
  bool stop_ = false;
  const pid_t owner_process_;
  std::thread thread_;
};

}  // namespace autohete
