#include "csrc/device/cuda_device.h"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/device/cuda_check.h"

namespace autohete {
namespace {

using cuda::check;
using cuda::DeviceGuard;
using cuda::ignore;

// Events and streams, kept for reuse. A pending callback may be the last to hold the pool, and may
// not call CUDA, so close() destroys and the destructor does not.
class Pool {
 public:
  // Called by the device's destructor. A forked child leaves the parent's CUDA objects alone.
  void close() {
    if (getpid() != owner_process_) return;
    std::lock_guard lock(mutex_);
    closed_ = true;
    for (cudaEvent_t event : events_) ignore(cudaEventDestroy(event));
    for (cudaStream_t stream : streams_) ignore(cudaStreamDestroy(stream));
    events_.clear();
  }

  cudaEvent_t take_event() {
    if (cudaEvent_t event = take(events_)) return event;
    cudaEvent_t event = nullptr;
    // Blocking: a thread that synchronizes leaves its core to the CPU optimizer.
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
          "cudaEventCreateWithFlags");
    return event;
  }
  cudaStream_t take_stream() {
    if (cudaStream_t stream = take(idle_streams_)) return stream;
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    std::lock_guard lock(mutex_);
    streams_.push_back(stream);
    return stream;
  }
  void give_back(cudaEvent_t event) {
    if (getpid() != owner_process_) return;
    std::lock_guard lock(mutex_);
    if (closed_) {
      ignore(cudaEventDestroy(event));
    } else {
      events_.push_back(event);
    }
  }
  void give_back(cudaStream_t stream) {
    std::lock_guard lock(mutex_);
    idle_streams_.push_back(stream);
  }

 private:
  template <typename T>
  T take(std::vector<T>& kept) {
    std::lock_guard lock(mutex_);
    if (kept.empty()) return nullptr;
    T last = kept.back();
    kept.pop_back();
    return last;
  }

  const pid_t owner_process_ = getpid();
  std::mutex mutex_;  // guards all below
  bool closed_ = false;
  std::vector<cudaEvent_t> events_;         // idle
  std::vector<cudaStream_t> streams_;       // all, owned
  std::vector<cudaStream_t> idle_streams_;  // those free to wait for an event
};

struct CudaEvent final : Event::State {
  explicit CudaEvent(std::shared_ptr<Pool> from)
      : pool(std::move(from)), event(pool->take_event()) {}
  // A wait already queued keeps the meaning that the event had then, so it may be used again.
  ~CudaEvent() override { pool->give_back(event); }
  const std::shared_ptr<Pool> pool;
  const cudaEvent_t event;
};

cudaEvent_t native(const Event& event) {
  const auto* state = dynamic_cast<const CudaEvent*>(event.state().get());
  require(state != nullptr, "cuda device: the event belongs to another kind of device");
  return state->event;
}

void launch_callback(cudaStream_t stream, std::function<void()> callback) {
  auto owned = std::make_unique<std::function<void()>>(std::move(callback));
  const auto run = [](void* data) {
    std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(data));
    (*owned)();
  };
  check(cudaLaunchHostFunc(stream, run, owned.get()), "cudaLaunchHostFunc");
  (void)owned.release();  // the callback frees it
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index) : index_(index), pool_(std::make_shared<Pool>()) {
    const int count = cuda_device_count();
    require(index >= 0 && index < count, "cuda device: index is ", index, ", expected 0 to ",
            count - 1, " (GPUs found: ", count,
            "); without a GPU use .to(\"cpu\"), the host device");
    check(cudaGetDeviceProperties(&properties_, index), "cudaGetDeviceProperties");
  }
  // Copies still queued go on; CUDA frees their streams when they have ended.
  ~CudaDevice() override { pool_->close(); }

  DeviceCapabilities capabilities() const override {
    const bool registered =
        has(cudaDevAttrUnifiedAddressing) && has(cudaDevAttrCanUseHostPointerForRegisteredMem);
    return {properties_.name, true, registered || has(cudaDevAttrPageableMemoryAccess),
            properties_.totalGlobalMem};
  }

  StreamId create_stream(CopyDirection direction) override {
    DeviceGuard guard(index_);
    cudaStream_t stream = pool_->take_stream();
    std::lock_guard lock(mutex_);
    streams_.push_back({stream, direction == CopyDirection::kHostToDevice
                                    ? cudaMemcpyHostToDevice
                                    : cudaMemcpyDeviceToHost});
    return streams_.size();  // the first is 1: 0 is kComputeStream
  }

  void set_compute_stream(std::uintptr_t native_stream) override {
    std::lock_guard lock(mutex_);
    last_compute_stream_ = reinterpret_cast<cudaStream_t>(native_stream);
    compute_streams_[std::this_thread::get_id()] = last_compute_stream_;
  }

  void copy_async(void* dst, const void* src, std::size_t bytes, StreamId id) override {
    if (bytes == 0) return;
    DeviceGuard guard(index_);
    const Stream stream = find(id);
    check(cudaMemcpyAsync(dst, src, bytes, stream.kind, stream.native), "cudaMemcpyAsync");
  }

  Event record(StreamId id) override {
    DeviceGuard guard(index_);
    const Stream stream = find(id);
    auto state = std::make_shared<CudaEvent>(pool_);
    state->stream = reinterpret_cast<std::uintptr_t>(stream.native);
    state->sequence = next_sequence_++;
    check(cudaEventRecord(state->event, stream.native), "cudaEventRecord");
    return Event(state);
  }

  void wait(StreamId id, const Event& event) override {
    if (!event.state()) return;
    DeviceGuard guard(index_);
    check(cudaStreamWaitEvent(find(id).native, native(event), 0), "cudaStreamWaitEvent");
  }

  bool query(const Event& event) override {
    if (!event.state()) return true;
    DeviceGuard guard(index_);
    const cudaError_t error = cudaEventQuery(native(event));
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();  // not a failure: torch must not find it
      return false;
    }
    check(error, "cudaEventQuery");
    return true;
  }

  void synchronize(const Event& event) override {
    if (!event.state()) return;
    DeviceGuard guard(index_);
    check(cudaEventSynchronize(native(event)), "cudaEventSynchronize");
  }

  void host_callback(StreamId id, std::function<void()> callback) override {
    DeviceGuard guard(index_);
    launch_callback(find(id).native, std::move(callback));
  }

  // A stream of its own waits, so that the work behind the event is not held up by the callback.
  void when_complete(const Event& event, std::function<void()> callback) override {
    if (query(event)) {
      callback();
      return;
    }
    DeviceGuard guard(index_);
    cudaStream_t waiter = pool_->take_stream();
    try {
      check(cudaStreamWaitEvent(waiter, native(event), 0), "cudaStreamWaitEvent");
      launch_callback(waiter, [pool = pool_, waiter, callback = std::move(callback)] {
        pool->give_back(waiter);
        callback();
      });
    } catch (...) {
      pool_->give_back(waiter);
      throw;
    }
  }

 private:
  struct Stream {
    cudaStream_t native;
    cudaMemcpyKind kind;
  };

  // Asked by name: the layout of cudaDeviceProp past its first members changes between CUDAs.
  bool has(cudaDeviceAttr attribute) const {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, index_), "cudaDeviceGetAttribute");
    return value != 0;
  }

  Stream find(StreamId id) {
    std::lock_guard lock(mutex_);
    if (id == kComputeStream) {
      const auto found = compute_streams_.find(std::this_thread::get_id());
      return {found == compute_streams_.end() ? last_compute_stream_ : found->second,
              cudaMemcpyDefault};
    }
    require(id <= streams_.size(), "cuda device: stream is ", id, ", expected at most ",
            streams_.size(), "; streams come from create_stream()");
    return streams_[id - 1];
  }

  const int index_;
  const std::shared_ptr<Pool> pool_;
  cudaDeviceProp properties_{};
  std::atomic<std::uint64_t> next_sequence_{1};
  std::mutex mutex_;  // guards the three below
  std::vector<Stream> streams_;
  std::unordered_map<std::thread::id, cudaStream_t> compute_streams_;
  cudaStream_t last_compute_stream_ = nullptr;  // what a thread gets that never set one
};

}  // namespace

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

std::unique_ptr<Device> make_cuda_device(int index) { return std::make_unique<CudaDevice>(index); }

}  // namespace autohete
