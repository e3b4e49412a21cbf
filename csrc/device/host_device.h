// The host device: the seam implemented with threads and plain copies, so that everything runs and
// is tested without a GPU. "Device memory" is host memory counted against a budget (HostStore);
// link(direction) throttles, holds, delays and fails the copies.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/device/budget.h"
#include "csrc/device/device.h"
#include "csrc/device/host_link.h"
#include "csrc/device/host_stream.h"

namespace autohete {

// kComputeStream is the calling thread: copies and callbacks on it happen at once, record() gives a
// complete event, wait() blocks. In a forked child everything behaves like that, since the threads
// stayed in the parent; an event that was pending there throws std::runtime_error.
//
// A copy over a link that nothing slows or holds is made by who asks for it, where its stream is
// idle: the same bytes at the same speed, and no thread to wake (measured: 4 to 6 us a copy).
class HostDevice final : public Device {
 public:
  explicit HostDevice(std::shared_ptr<Budget> device_budget);
  // Ends holds, fails the copies still queued, runs the callbacks and joins.
  ~HostDevice() override;

  HostLink& link(CopyDirection direction);
  const std::shared_ptr<Budget>& device_budget() const { return device_budget_; }
  // What capabilities() says from now on, for tests of devices that cannot read host memory.
  void set_host_memory_readable(bool readable) { host_memory_readable_ = readable; }

  DeviceCapabilities capabilities() const override;
  StreamId create_stream(CopyDirection direction) override;
  void set_compute_stream(std::uintptr_t) override {}
  void copy_async(void* dst, const void* src, std::size_t bytes, StreamId stream) override;
  Event record(StreamId stream) override;
  void wait(StreamId stream, const Event& event) override;
  bool query(const Event& event) override;
  void synchronize(const Event& event) override;
  void host_callback(StreamId stream, std::function<void()> callback) override;
  void when_complete(const Event& event, std::function<void()> callback) override;

 private:
  struct Stream {
    explicit Stream(CopyDirection direction) : direction(direction) {}
    CopyDirection direction;
    HostStream queue;
  };
  // What threads wait in; left alone as a whole in a forked child.
  struct Lanes {
    std::array<HostLink, 2> links;
    std::mutex mutex;  // guards streams, which only grows; the streams have their own locks
    std::vector<std::unique_ptr<Stream>> streams;
  };

  bool on_caller(StreamId stream) const;
  Stream& find(StreamId stream);  // takes lanes_->mutex

  const std::shared_ptr<Budget> device_budget_;
  const pid_t owner_process_;
  std::atomic<bool> host_memory_readable_{true};
  std::atomic<std::uint64_t> next_sequence_{1};
  std::unique_ptr<Lanes> lanes_;
};

}  // namespace autohete
