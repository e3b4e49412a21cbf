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

void UpdateLane::push(std::uint64_t priority, std::function<void()> job) {
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
    std::function<void()> job = std::move(queue_.begin()->second);
    queue_.erase(queue_.begin());
    lock.unlock();
    job();
    job = nullptr;  // what it holds is freed outside the lock
    lock.lock();
  }
}

}  // namespace autohete
