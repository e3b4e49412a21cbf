// The CPU lane: one thread that takes updates, smallest unit first, and runs each on all workers.
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
  void push(std::uint64_t priority, std::function<void()> job);

 private:
  void run();

  std::mutex mutex_;  // guards all below but thread_
  std::condition_variable changed_;
  std::multimap<std::uint64_t, std::function<void()>> queue_;
  bool stop_ = false;
  const pid_t owner_process_;
  std::thread thread_;
};

}  // namespace autohete
