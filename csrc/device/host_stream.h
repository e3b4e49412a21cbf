// The host device's streams and events: a thread that runs its queue in order, and a flag that one
// thread raises and others wait for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/device/device.h"

namespace autohete {

// Any thread. Waits on an atomic, since a forked child that destroyed a condition variable with
// waiters in the parent would hang.
class HostEvent final : public Event::State {
 public:
  // Completes the event, with what failed or null, and runs the callbacks on the calling thread.
  void complete(std::exception_ptr failure);
  // True when complete. Rethrows the failure.
  bool query();
  // Blocks until complete. Rethrows the failure.
  void wait();
  // Runs `callback` once the event is complete: now, or on the thread that completes it.
  void when_complete(std::function<void()> callback);

 private:
  std::atomic<bool> done_{false};
  std::exception_ptr failure_;  // written before done_ is set, never after
  std::mutex mutex_;            // guards callbacks_ and the step from pending to done
  std::vector<std::function<void()>> callbacks_;
};

// Runs work in order on a thread of its own, or on the caller's where that is idle. A failure of
// some work is handed to the event recorded next; work after that event is not affected. Any thread
// may push.
class HostStream {
 public:
  HostStream();
  // Runs what is still queued (the device has closed its links, so copies fail fast), and joins.
  ~HostStream();

  void push(std::function<void()> work);
  // Runs `work` here and now where nothing else is queued or running; else false.
  bool run_if_idle(const std::function<void()>& work);
  void record(std::shared_ptr<HostEvent> event);

 private:
  void run();
  void do_work(const std::function<void()>& work);

  std::mutex mutex_;  // guards queue_, running_, stopping_
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool running_ = false;  // some work, here or on a caller's thread
  bool stopping_ = false;
  std::exception_ptr failure_;  // of the work since the last record; who is running_ has it
  std::thread thread_;
};

}  // namespace autohete
