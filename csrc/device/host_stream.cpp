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

bool HostStream::run_if_idle(const std::function<void()>& work) {
  {
    std::lock_guard lock(mutex_);
    if (running_ || !queue_.empty()) return false;
    running_ = true;
  }
  do_work(work);
  bool waited_for = false;
  {
    std::lock_guard lock(mutex_);
    running_ = false;
    waited_for = stopping_ || !queue_.empty();
  }
  if (waited_for) changed_.notify_one();
  return true;
}

void HostStream::record(std::shared_ptr<HostEvent> event) {
  const auto complete = [this, event = std::move(event)] {
    event->complete(std::exchange(failure_, nullptr));
  };
  if (!run_if_idle(complete)) push(complete);
}

void HostStream::do_work(const std::function<void()>& work) {
  try {
    work();
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
}

void HostStream::run() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !running_ && (stopping_ || !queue_.empty()); });
      if (queue_.empty()) return;
      running_ = true;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    do_work(work);
    std::lock_guard lock(mutex_);
    running_ = false;
  }
}

}  // namespace autohete
