#include "csrc/runtime/in_order_lane.h"

#include <unistd.h>

#include <utility>

namespace autohete {

InOrderLane::InOrderLane() : owner_process_(getpid()), thread_([this] { run(); }) {}

InOrderLane::~InOrderLane() {
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

void InOrderLane::expect(int key) {
  std::lock_guard lock(mutex_);
  order_.push_back(key);
}

void InOrderLane::ready(int key, std::function<void()> job) {
  {
    std::lock_guard lock(mutex_);
    jobs_[key] = std::move(job);
  }
  changed_.notify_one();
}

void InOrderLane::run() {
  std::unique_lock lock(mutex_);
  const auto next_is_ready = [this] { return !order_.empty() && jobs_.count(order_.front()) > 0; };
  while (true) {
    changed_.wait(lock, [&] { return stop_ || next_is_ready(); });
    if (stop_) return;
    std::function<void()> job = std::move(jobs_.extract(order_.front()).mapped());
    order_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // what it holds is freed outside the lock
    lock.lock();
  }
}

}  // namespace autohete
