// The seam between the engine and a device: streams, asynchronous copies, events, host callbacks.
//
// Two sides implement it: host_device (own threads, real copies, a budget; needs no GPU) and
// cuda_device (the CUDA runtime API). Everything above this header is the same for both.
//
// Thread rule: every method may be called from any thread. Streams are in-order; different streams
// are unordered unless an event orders them. No method holds the GIL or calls Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace autohete {

enum class CopyDirection : std::uint8_t { kHostToDevice, kDeviceToHost };

// An in-order queue of work. kComputeStream is the stream the user's kernels run on *now*: the
// calling thread itself on the host device, the CUDA stream last given to set_compute_stream() on
// CUDA. Others come from create_stream().
using StreamId = std::uint64_t;
inline constexpr StreamId kComputeStream = 0;

// A point in a stream. Copyable; the last copy frees it. A default-made event is always complete.
class Event {
 public:
  // Each device derives its own state from this.
  struct State {
    virtual ~State() = default;
    std::uint64_t stream = 0;    // which stream it was recorded on, unique within the device
    std::uint64_t sequence = 0;  // grows with every record of the device
  };
  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  const std::shared_ptr<State>& state() const { return state_; }

  // True when `later` cannot complete before this one: both were recorded on one stream, this one
  // first (or they are the same).
  bool completes_by(const Event& later) const {
    if (!state_ || !later.state_) return !state_;
    return state_->stream == later.state_->stream && state_->sequence <= later.state_->sequence;
  }

 private:
  std::shared_ptr<State> state_;
};

struct DeviceCapabilities {
  std::string name;  // "host" or the GPU's name
  bool is_cuda = false;
  // Device code can dereference a pinned host pointer (unified addressing). Where false,
  // parameters are not offloaded and gradients are not shown on the host.
  bool host_memory_readable_by_device = true;
  std::size_t total_bytes = 0;  // the budget on the host device
};

class Device {
 public:
  virtual ~Device() = default;

  virtual DeviceCapabilities capabilities() const = 0;

  // A new in-order stream for copies in one direction. Destroyed with the device.
  virtual StreamId create_stream(CopyDirection direction) = 0;

  // CUDA: the cudaStream_t (as integer) that kComputeStream stands for from now on, for the
  // calling thread's later record()/wait(), and for threads that never set one. Ignored on the host
  // device.
  virtual void set_compute_stream(std::uintptr_t native_stream) = 0;

  // Queues a copy of `bytes` on `stream`; returns at once. Both ranges must stay valid until an
  // event recorded after it completes. Throws std::runtime_error when the device refuses. bytes
  // may be 0.
  virtual void copy_async(void* dst, const void* src, std::size_t bytes, StreamId stream) = 0;

  // Marks the present end of `stream`.
  virtual Event record(StreamId stream) = 0;

  // Later work on `stream` starts after `event`; the caller does not block, except on the host
  // device with kComputeStream, where the stream is the caller.
  virtual void wait(StreamId stream, const Event& event) = 0;

  // True when all work before the event is done. Rethrows a failure of that work.
  virtual bool query(const Event& event) = 0;

  // Blocks the caller until query(event) would be true. Rethrows a failure of that work.
  virtual void synchronize(const Event& event) = 0;

  // Runs `callback` once when everything queued on `stream` so far is done, on a thread of the
  // device. The callback must not call the device, take the GIL, block or throw.
  virtual void host_callback(StreamId stream, std::function<void()> callback) = 0;

  // Runs `callback` once when `event` is done or has failed (query tells which), on a thread of the
  // device, or at once on the caller when it is done already. Under host_callback's rules. No
  // stream waits for it.
  virtual void when_complete(const Event& event, std::function<void()> callback) = 0;
};

}  // namespace autohete
