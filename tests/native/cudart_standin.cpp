#include "tests/native/cudart_standin.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

// A point in a stream: `ticket` of `stream`'s queue; done when the stream has run that far.
struct CUevent_st {
  int device;
  std::shared_ptr<std::atomic<bool>> done = std::make_shared<std::atomic<bool>>(true);
};

struct CUstream_st {
  explicit CUstream_st(int device) : device(device), thread([this] { run(); }) {}
  ~CUstream_st() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }
  void push(std::function<void()> work) {
    std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stopping || !queue.empty(); });
        if (queue.empty()) return;
        work = std::move(queue.front());
        queue.pop_front();
      }
      work();
    }
  }

  const int device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool stopping = false;
  std::thread thread;
};

namespace {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool in_callback = false;

struct Gate {
  bool held = false;
  std::size_t permits = 0;
};

struct World {
  std::mutex mutex;  // guards everything below
  std::condition_variable changed;
  int device_count = 2;
  bool readable = true;
  std::map<cudaMemcpyKind, Gate> gates;
  std::string failing_function;
  cudaError_t failing_error = cudaSuccess;
  std::atomic<cudaError_t> broken{cudaSuccess};
  std::mt19937_64 random;
  double max_delay_seconds = 0;
  std::size_t register_limit = std::numeric_limits<std::size_t>::max();
  std::map<void*, std::size_t> registered;
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
  std::map<std::string, std::size_t> calls;
  std::size_t violations = 0;
  std::map<int, std::unique_ptr<CUstream_st>> default_streams;  // the null stream of each device
  std::vector<std::thread> closing;                             // streams destroyed with work left
  std::vector<void*> never_called;  // of callbacks in a broken context: lost there, not leaked
};
World& world() {
  static World& one = *new World;  // never destroyed: leak checks run after destructors
  return one;
}

const char* const kFunctions[] = {
    "cudaGetDeviceCount",       "cudaGetDevice",          "cudaSetDevice",
    "cudaGetDeviceProperties",  "cudaDeviceGetAttribute", "cudaMemGetInfo",
    "cudaEventCreateWithFlags", "cudaEventRecord",        "cudaEventQuery",
    "cudaEventSynchronize",     "cudaEventDestroy",       "cudaStreamCreateWithFlags",
    "cudaStreamDestroy",        "cudaStreamWaitEvent",    "cudaMemcpyAsync",
    "cudaLaunchHostFunc",       "cudaHostRegister",       "cudaHostUnregister"};

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// The error that `function` must return before it does anything.
cudaError_t enter(const char* function) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  ++w.calls[function];
  if (in_callback) {
    ++w.violations;
    return remember(cudaErrorNotPermitted);
  }
  if (w.broken != cudaSuccess) return remember(w.broken);
  if (w.failing_function == function) {
    w.failing_function.clear();
    return remember(w.failing_error);
  }
  return cudaSuccess;
}
#define ENTER(function)                                                          \
  do {                                                                           \
    if (cudaError_t error = enter(function); error != cudaSuccess) return error; \
  } while (false)

// The stream behind a handle; null when the handle is wrong or another device is current.
CUstream_st* find_stream(cudaStream_t handle) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  if (handle == nullptr) {
    auto& stream = w.default_streams[current_device];
    if (!stream) stream = std::make_unique<CUstream_st>(current_device);
    return stream.get();
  }
  return w.streams.count(handle) && handle->device == current_device ? handle : nullptr;
}
bool known(cudaEvent_t event) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  return w.events.count(event) > 0;
}

void pass_gate(cudaMemcpyKind kind) {
  World& w = world();
  std::unique_lock lock(w.mutex);
  Gate& gate = w.gates[kind];
  w.changed.wait(lock, [&] { return !gate.held || gate.permits > 0 || w.broken != cudaSuccess; });
  if (gate.held && gate.permits > 0) --gate.permits;
  if (w.max_delay_seconds == 0) return;
  const double seconds = std::uniform_real_distribution<double>(0, w.max_delay_seconds)(w.random);
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));  // the delay asked for
}

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  ENTER("cudaGetDeviceCount");
  *count = world().device_count;
  return *count > 0 ? cudaSuccess : remember(cudaErrorNoDevice);
}

cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  ENTER("cudaGetDevice");
  *device = current_device;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaSetDevice(int device) {
  ENTER("cudaSetDevice");
  if (device < 0 || device >= world().device_count) return remember(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  ENTER("cudaGetDeviceProperties");
  if (device < 0 || device >= world().device_count) return remember(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "stand-in GPU");
  properties->totalGlobalMem = std::size_t{1} << 30;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ENTER("cudaDeviceGetAttribute");
  if (device < 0 || device >= world().device_count) return remember(cudaErrorInvalidDevice);
  *value = attribute == cudaDevAttrUnifiedAddressing ||
           (attribute == cudaDevAttrCanUseHostPointerForRegisteredMem && world().readable);
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  ENTER("cudaMemGetInfo");
  *free_bytes = 4321;
  *total_bytes = std::size_t{1} << 30;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  ENTER("cudaStreamCreateWithFlags");
  *stream = new CUstream_st(current_device);
  std::lock_guard lock(world().mutex);
  world().streams.insert(*stream);
  return cudaSuccess;
}

// Returns at once; the stream ends when its work has.
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) {
  ENTER("cudaStreamDestroy");
  std::lock_guard lock(world().mutex);
  if (world().streams.erase(stream) == 0) return remember(cudaErrorInvalidResourceHandle);
  world().closing.emplace_back([stream] { delete stream; });
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned int) {
  ENTER("cudaStreamWaitEvent");
  CUstream_st* stream = find_stream(handle);
  if (!stream || !known(event)) return remember(cudaErrorInvalidResourceHandle);
  stream->push([done = event->done] { done->wait(false); });
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  ENTER("cudaEventCreateWithFlags");
  *event = new CUevent_st{current_device};
  std::lock_guard lock(world().mutex);
  world().events.insert(*event);
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
  ENTER("cudaEventDestroy");
  std::lock_guard lock(world().mutex);
  if (world().events.erase(event) == 0) return remember(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  ENTER("cudaEventRecord");
  CUstream_st* stream = find_stream(handle);
  if (!stream || !known(event) || event->device != stream->device) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  // A flag of its own for each record: waits queued earlier keep the earlier one.
  auto done = std::make_shared<std::atomic<bool>>(false);
  event->done = done;
  stream->push([done] {
    *done = true;
    done->notify_all();
  });
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
  ENTER("cudaEventQuery");
  if (!known(event)) return remember(cudaErrorInvalidResourceHandle);
  return *event->done ? cudaSuccess : remember(cudaErrorNotReady);
}

cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
  ENTER("cudaEventSynchronize");
  if (!known(event)) return remember(cudaErrorInvalidResourceHandle);
  event->done->wait(false);
  return remember(world().broken);
}

cudaError_t CUDARTAPI cudaMemcpyAsync(void* dst, const void* src, std::size_t count,
                                      cudaMemcpyKind kind, cudaStream_t handle) {
  ENTER("cudaMemcpyAsync");
  CUstream_st* stream = find_stream(handle);
  if (!stream) return remember(cudaErrorInvalidResourceHandle);
  stream->push([=] {
    pass_gate(kind);
    if (world().broken == cudaSuccess) std::memcpy(dst, src, count);
  });
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  ENTER("cudaLaunchHostFunc");
  CUstream_st* stream = find_stream(handle);
  if (!stream) return remember(cudaErrorInvalidResourceHandle);
  stream->push([=] {
    if (world().broken != cudaSuccess) {
      std::lock_guard lock(world().mutex);
      world().never_called.push_back(data);
      return;
    }
    in_callback = true;
    function(data);
    in_callback = false;
  });
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaHostRegister(void* data, std::size_t bytes, unsigned int) {
  ENTER("cudaHostRegister");
  World& w = world();
  std::lock_guard lock(w.mutex);
  std::size_t total = bytes;
  for (const auto& [start, length] : w.registered) total += length;
  if (total > w.register_limit) return remember(cudaErrorMemoryAllocation);
  if (!w.registered.emplace(data, bytes).second) {
    return remember(cudaErrorHostMemoryAlreadyRegistered);
  }
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaHostUnregister(void* data) {
  ENTER("cudaHostUnregister");
  std::lock_guard lock(world().mutex);
  if (world().registered.erase(data) == 0) return remember(cudaErrorHostMemoryNotRegistered);
  return cudaSuccess;
}

// These two never fail.
cudaError_t CUDARTAPI cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* CUDARTAPI cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotPermitted:
      return "operation not permitted";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    default:
      return "another error";
  }
}

}  // extern "C"

namespace cudart_standin {

void reset() {
  World& w = world();
  std::vector<std::thread> closing;
  std::map<int, std::unique_ptr<CUstream_st>> default_streams;
  {
    std::lock_guard lock(w.mutex);
    for (auto& [kind, gate] : w.gates) gate.held = false;
    w.changed.notify_all();
    closing.swap(w.closing);
    default_streams.swap(w.default_streams);
  }
  for (std::thread& thread : closing) thread.join();
  default_streams.clear();
  std::lock_guard lock(w.mutex);
  w.device_count = 2;
  w.readable = true;
  w.failing_function.clear();
  w.broken = cudaSuccess;
  w.max_delay_seconds = 0;
  w.register_limit = std::numeric_limits<std::size_t>::max();
  w.calls.clear();
  w.violations = 0;
  last_error = cudaSuccess;
  current_device = 0;
}

void clean_up() {
  World& w = world();
  std::set<cudaStream_t> streams;
  {
    std::lock_guard lock(w.mutex);
    streams.swap(w.streams);
  }
  for (cudaStream_t stream : streams) delete stream;  // unlocked: its last work may need the lock
  std::lock_guard lock(w.mutex);
  for (cudaEvent_t event : w.events) delete event;
  w.events.clear();
  w.registered.clear();
}

std::vector<std::string> function_names() { return {std::begin(kFunctions), std::end(kFunctions)}; }

void fail_next(const std::string& function, cudaError_t error) {
  std::lock_guard lock(world().mutex);
  world().failing_function = function;
  world().failing_error = error;
}
bool failure_was_met() {
  std::lock_guard lock(world().mutex);
  return world().failing_function.empty();
}
void break_down(cudaError_t error) {
  std::lock_guard lock(world().mutex);
  world().broken = error;
  world().changed.notify_all();
}

void hold(cudaMemcpyKind kind) {
  std::lock_guard lock(world().mutex);
  world().gates[kind] = {true, 0};
}
void release(cudaMemcpyKind kind, std::size_t num_copies) {
  std::lock_guard lock(world().mutex);
  world().gates[kind].permits += num_copies;
  world().changed.notify_all();
}
void release_all(cudaMemcpyKind kind) {
  std::lock_guard lock(world().mutex);
  world().gates[kind].held = false;
  world().changed.notify_all();
}
void random_delays(std::uint64_t seed, double max_seconds) {
  std::lock_guard lock(world().mutex);
  world().random.seed(seed);
  world().max_delay_seconds = max_seconds;
}

void limit_registered_bytes(std::size_t bytes) {
  std::lock_guard lock(world().mutex);
  world().register_limit = bytes;
}
std::size_t registered_bytes() {
  std::lock_guard lock(world().mutex);
  std::size_t total = 0;
  for (const auto& [start, bytes] : world().registered) total += bytes;
  return total;
}
void set_device_count(int count) { world().device_count = count; }
void set_host_pointers_readable(bool readable) { world().readable = readable; }

std::size_t num_streams() {
  std::lock_guard lock(world().mutex);
  return world().streams.size();
}
std::size_t num_events() {
  std::lock_guard lock(world().mutex);
  return world().events.size();
}
std::size_t num_violations() {
  std::lock_guard lock(world().mutex);
  return world().violations;
}
std::size_t num_calls(const std::string& function) {
  std::lock_guard lock(world().mutex);
  return world().calls[function];
}

}  // namespace cudart_standin
