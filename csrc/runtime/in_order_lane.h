// A thread that runs jobs in an order fixed beforehand, however late each becomes ready. For work
// that several processes do together: each does it in the same order, so they meet.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace autohete {

// Any thread may call. A job runs on the lane's thread and must not throw.
class InOrderLane {
 public:
  InOrderLane();
  ~InOrderLane();  // drops what has not started and joins
  InOrderLane(const InOrderLane&) = delete;
  InOrderLane& operator=(const InOrderLane&) = delete;

  // The next job in the order is that of `key`, which is not in it already.
  void expect(int key);
  // The job of `key`, which was expected.
  void ready(int key, std::function<void()> job);

 private:
  void run();

  std::mutex mutex_;  // guards all below but thread_
  std::condition_variable changed_;
  std::deque<int> order_;
  std::map<int, std::function<void()>> jobs_;
  bool stop_ = false;
  const pid_t owner_process_;
  std::thread thread_;
};

}  // namespace autohete
