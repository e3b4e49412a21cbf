#include "csrc/runtime/update_lane.h"

#include <utility>

namespace autohete {

void UpdateLane::push(std::uint64_t priority, Job job) {
  {
    const auto lock = thread_.lock();
    queue_.emplace(priority, std::move(job));
  }
  thread_.notify();
}

void UpdateLane::run_first(LaneThread::Lock& lock) {
  auto first = queue_.extract(queue_.begin());
  const std::uint64_t outer = std::exchange(running_, first.key());
  LaneThread::run_unlocked(lock, std::move(first.mapped()), *this);
  running_ = outer;
}

bool UpdateLane::more_urgent() const {
  return !thread_.stopping() && !queue_.empty() && queue_.begin()->first < running_;
}

bool UpdateLane::has_more_urgent() {
  const auto lock = thread_.lock();
  return more_urgent();
}

bool UpdateLane::wait_for_more_urgent(std::chrono::steady_clock::time_point end) {
  auto lock = thread_.lock();
  thread_.wait_until(lock, end, [this] { return thread_.stopping() || more_urgent(); });
  return more_urgent();
}

void UpdateLane::give_way() {
  auto lock = thread_.lock();
  while (more_urgent()) run_first(lock);
}

}  // namespace autohete
