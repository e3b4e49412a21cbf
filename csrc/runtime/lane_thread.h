// The thread of a lane: runs jobs one by one, when the lane says that one is ready.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace autohete {

// Whoever owns it declares it last: it calls the functions from the start, with the lock held.
class LaneThread {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // `run_next` takes the job that `ready` saw and runs it with run_unlocked().
  LaneThread(std::function<bool()> ready, std::function<void(Lock&)> run_next)
      : ready_(std::move(ready)), run_next_(std::move(run_next)), thread_([this] { run(); }) {}
  // Drops what has not started and joins.
  ~LaneThread() {
    if (getpid() != owner_process_) {  // a forked child: the thread stayed in the parent
      thread_.detach();
      return;
    }
    {
      Lock lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

  Lock lock() { return Lock(mutex_); }
  void notify() { changed_.notify_one(); }
  // For the job that runs; woken by notify().
  template <typename Time, typename Predicate>
  void wait_until(Lock& lock, Time end, Predicate ready) {
    changed_.wait_until(lock, end, ready);
  }
  // With the lock held.
  bool stopping() const { return stop_; }
  // Runs `job` without the lock, and frees what it holds before it takes the lock again.
  template <typename Job, typename... Args>
  static void run_unlocked(Lock& lock, Job job, Args&... args) {
    lock.unlock();
    job(args...);
    job = nullptr;
    lock.lock();
  }

 private:
  void run() {
    Lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || ready_(); });
      if (stop_) return;
      run_next_(lock);
    }
  }

  const std::function<bool()> ready_;
  const std::function<void(Lock&)> run_next_;
  const pid_t owner_process_ = getpid();
  std::mutex mutex_;  // guards stop_ and what the lane keeps
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace autohete
