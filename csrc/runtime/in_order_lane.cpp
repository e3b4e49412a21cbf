#include "csrc/runtime/in_order_lane.h"

#include <utility>

namespace autohete {

void InOrderLane::expect(int key) {
  const auto lock = thread_.lock();
  order_.push_back(key);
}

void InOrderLane::ready(int key, std::function<void()> job) {
  {
    const auto lock = thread_.lock();
    jobs_[key] = std::move(job);
  }
  thread_.notify();
}

void InOrderLane::run_next(LaneThread::Lock& lock) {
  std::function<void()> job = std::move(jobs_.extract(order_.front()).mapped());
  order_.pop_front();
  LaneThread::run_unlocked(lock, std::move(job));
}

}  // namespace autohete
