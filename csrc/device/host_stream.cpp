#include "csrc/device/host_stream.h"

#include <utility>

namespace autohete {

void HostEvent::complete(std::exception_ptr failure) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    done_ = true;
    callbacks.swap(callbacks_);
  }
  done_.notify_all();
  for (auto& callback : callbacks) callback();
}

bool HostEvent::query() {
  if (!done_) return false;
  if (failure_) std::rethrow_exception(failure_);
  return true;
}

void HostEvent::wait() {
  done_.wait(false);
  query();
}

void HostEvent::when_complete(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

HostStream::HostStream() : thread_([this] { run(); }) {}

HostStream::~HostStream() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void HostStream::push(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_one();  // whoever pushes keeps the stream: the thread wakes to a free lock
}

void HostStream::record(std::shared_ptr<HostEvent> event) {
  push([this, event = std::move(event)] { event->complete(std::exchange(failure_, nullptr)); });
}

void HostStream::run() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    try {
      work();
    } catch (...) {
      if (!failure_) failure_ = std::current_exception();
    }
  }
}

}  // namespace autohete
