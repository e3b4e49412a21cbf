// A thread that runs jobs in an order fixed beforehand, however late each becomes ready. For work
// that several processes do together: each does it in the same order, so they meet.
#pragma once

#include <deque>
#include <functional>
#include <map>

#include "csrc/runtime/lane_thread.h"

namespace autohete {

// Any thread may call. A job runs on the lane's thread and must not throw. The destructor drops
// what has not started and joins.
class InOrderLane {
 public:
  // The next job in the order is that of `key`, which is not in it already.
  void expect(int key);
  // The job of `key`, which was expected.
  void ready(int key, std::function<void()> job);

 private:
  bool next_is_ready() const { return !order_.empty() && jobs_.count(order_.front()) > 0; }
  void run_next(LaneThread::Lock& lock);

  // With the thread's lock:
  std::deque<int> order_;
  std::map<int, std::function<void()>> jobs_;
  LaneThread thread_{[this] { return next_is_ready(); },
                     [this](LaneThread::Lock& lock) { run_next(lock); }};
};

}  // namespace autohete
