// A library to preload in front of a CUDA emulation that does everything at the call. It makes the
// copies of the engine's own streams late: each such stream gets a thread that runs its work in
// order, every copy after a random delay, and events on it are complete when it has come to them.
// What computes before its copy has arrived then computes with old bytes, as it would on a GPU.
// Work on all other streams stays done at the call. See cuda_emulation.py:
//
//   g++ -std=c++20 -O2 -shared -fPIC -I CUDA_INCLUDE cuda_late_copies.cpp -o libcuda_late_copies.so
//
// LATE_COPIES_MAX_US bounds the delay (default 2000); LATE_COPIES_SEED chooses the delays.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace {

// The emulation's own function behind ours.
template <typename Function>
Function behind(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
#define BEHIND(function) behind(&function, #function)

// Where an event was recorded last: complete or not.
class Mark {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }
  bool done() {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }

 private:
  std::mutex mutex_;  // guards both below
  std::condition_variable changed_;
  bool done_ = false;
};
using MarkPtr = std::shared_ptr<Mark>;

class LateStream {
 public:
  LateStream() : thread_([this] { run(); }) {}
  ~LateStream() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  void drain() {
    const auto end = std::make_shared<Mark>();
    push([end] { end->set(); });
    end->wait();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      if (!work) return;
      work();
    }
  }

  std::mutex mutex_;  // guards work_
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::thread thread_;  // last: it uses the members above
};
using LateStreamPtr = std::shared_ptr<LateStream>;

struct World {
  std::mutex mutex;  // guards all below
  std::map<cudaStream_t, LateStreamPtr> streams;
  std::map<cudaEvent_t, MarkPtr> marks;
  std::mt19937_64 random{std::strtoull(std::getenv("LATE_COPIES_SEED") ?: "1", nullptr, 10)};
  long max_us = std::strtol(std::getenv("LATE_COPIES_MAX_US") ?: "2000", nullptr, 10);
};
World& world() {
  static World* one = new World;  // outlives whoever calls at the very end
  return *one;
}

LateStreamPtr late(cudaStream_t stream) {
  const std::lock_guard lock(world().mutex);
  const auto found = world().streams.find(stream);
  return found == world().streams.end() ? nullptr : found->second;
}

MarkPtr mark_of(cudaEvent_t event) {
  const std::lock_guard lock(world().mutex);
  const auto found = world().marks.find(event);
  return found == world().marks.end() ? nullptr : found->second;
}

std::chrono::microseconds delay() {
  const std::lock_guard lock(world().mutex);
  return std::chrono::microseconds(
      std::uniform_int_distribution<long>(0, world().max_us)(world().random));
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  const cudaError_t error = BEHIND(cudaStreamCreateWithFlags)(stream, flags);
  if (error != cudaSuccess) return error;
  const auto made = std::make_shared<LateStream>();
  const std::lock_guard lock(world().mutex);
  world().streams[*stream] = made;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  LateStreamPtr gone = late(stream);
  if (gone) {
    gone->drain();
    const std::lock_guard lock(world().mutex);
    world().streams.erase(stream);
  }
  gone.reset();
  return BEHIND(cudaStreamDestroy)(stream);
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const LateStreamPtr on = late(stream);
  if (!on) return BEHIND(cudaMemcpyAsync)(dst, src, bytes, kind, stream);
  on->push([dst, src, bytes, wait = delay()] {
    std::this_thread::sleep_for(wait);
    std::memcpy(dst, src, bytes);
  });
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto mark = std::make_shared<Mark>();
  {
    const std::lock_guard lock(world().mutex);
    world().marks[event] = mark;
  }
  if (const LateStreamPtr on = late(stream)) {
    on->push([mark] { mark->set(); });
    return cudaSuccess;
  }
  mark->set();
  return BEHIND(cudaEventRecord)(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const MarkPtr mark = mark_of(event);
  if (!mark) return BEHIND(cudaEventQuery)(event);
  return mark->done() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const MarkPtr mark = mark_of(event);
  if (!mark) return BEHIND(cudaEventSynchronize)(event);
  mark->wait();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  const MarkPtr mark = mark_of(event);
  if (!mark) return BEHIND(cudaStreamWaitEvent)(stream, event, flags);
  if (const LateStreamPtr on = late(stream)) {
    on->push([mark] { mark->wait(); });
  } else {
    mark->wait();  // its work is done at the call, so the call waits
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const LateStreamPtr on = late(stream);
  if (!on) return BEHIND(cudaLaunchHostFunc)(stream, function, data);
  on->push([function, data] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  std::map<cudaStream_t, LateStreamPtr> all;
  {
    const std::lock_guard lock(world().mutex);
    all = world().streams;
  }
  for (const auto& [handle, stream] : all) stream->drain();
  return BEHIND(cudaDeviceSynchronize)();
}
}
