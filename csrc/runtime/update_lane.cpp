#include "csrc/runtime/update_lane.h"

#include <unistd.h>

#include <utility>

namespace autohete {

UpdateLane::UpdateLane() : owner_process_(getpid()), thread_([this] { run(); }) {}

UpdateLane::~UpdateLane() {
  if (getpid() != owner_process_) {  // a forked child: the thread stayed in the parent
    thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void UpdateLane::push(std::uint64_t priority, Job job) {
  {
    std::lock_guard lock(mutex_);
    queue_.emplace(priority, std::move(job));
  }
  changed_.notify_one();
}

void UpdateLane::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    run_first(lock);
  }
}

void UpdateLane::run_first(std::unique_lock<std::mutex>& lock) {
  auto first = queue_.extract(queue_.begin());
  const std::uint64_t outer = std::exchange(running_, first.key());
  lock.unlock();
  Job job = std::move(first.mapped());
  job(*this);
  job = nullptr;  // what it holds is freed outside the lock
  lock.lock();
  running_ = outer;
}

bool UpdateLane::has_more_urgent() {
  std::lock_guard lock(mutex_);
  return more_urgent();
}

void UpdateLane::give_way() {
  std::unique_lock lock(mutex_);
  while (more_urgent()) run_first(lock);
}

}  // namespace autohete
