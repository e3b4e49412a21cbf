#include "csrc/device/host_device.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "csrc/base/check.h"

namespace autohete {
namespace {

std::shared_ptr<HostEvent> host_event(const Event& event) {
  auto state = std::dynamic_pointer_cast<HostEvent>(event.state());
  require(state || !event.state(), "host device: the event belongs to another kind of device");
  return state;
}

}  // namespace

HostDevice::HostDevice(std::shared_ptr<Budget> device_budget)
    : device_budget_(std::move(device_budget)),
      owner_process_(getpid()),
      lanes_(std::make_unique<Lanes>()) {}

HostDevice::~HostDevice() {
  if (getpid() != owner_process_) {
    (void)lanes_.release();  // the threads, and whoever held the locks, stayed in the parent
    return;
  }
  for (HostLink& link : lanes_->links) link.close();
  lanes_->streams.clear();
}

HostLink& HostDevice::link(CopyDirection direction) {
  return lanes_->links[static_cast<std::size_t>(direction)];
}

DeviceCapabilities HostDevice::capabilities() const {
  DeviceCapabilities result;
  result.name = "host";
  result.host_memory_readable_by_device = host_memory_readable_;
  result.total_bytes = device_budget_->limit();
  return result;
}

StreamId HostDevice::create_stream(CopyDirection direction) {
  std::lock_guard lock(lanes_->mutex);
  lanes_->streams.push_back(std::make_unique<Stream>(direction));
  return lanes_->streams.size();  // the first is 1: 0 is kComputeStream
}

bool HostDevice::on_caller(StreamId stream) const {
  return stream == kComputeStream || getpid() != owner_process_;
}

HostDevice::Stream& HostDevice::find(StreamId stream) {
  std::lock_guard lock(lanes_->mutex);
  require(stream <= lanes_->streams.size(), "host device: stream is ", stream,
          ", expected at most ", lanes_->streams.size(), "; streams come from create_stream()");
  return *lanes_->streams[stream - 1];
}

void HostDevice::copy_async(void* dst, const void* src, std::size_t bytes, StreamId stream) {
  if (bytes == 0) return;
  if (on_caller(stream)) {
    std::memcpy(dst, src, bytes);
    return;
  }
  Stream& target = find(stream);
  const auto direction = static_cast<std::size_t>(target.direction);
  const auto now = HostLink::Clock::now();
  const std::function<void()> copy = [this, dst, src, bytes, direction, now] {
    lanes_->links[direction].copy(dst, src, bytes, now, lanes_->links[1 - direction]);
  };
  if (lanes_->links[direction].is_free() && target.queue.run_if_idle(copy)) return;
  target.queue.push(copy);
}

Event HostDevice::record(StreamId stream) {
  if (on_caller(stream)) return Event();
  auto state = std::make_shared<HostEvent>();
  state->stream = stream;
  state->sequence = next_sequence_++;
  find(stream).queue.record(state);
  return Event(state);
}

void HostDevice::wait(StreamId stream, const Event& event) {
  auto state = host_event(event);
  if (!state) return;
  if (on_caller(stream)) {
    synchronize(event);
  } else {
    Stream& target = find(stream);
    target.queue.push([state, &link = link(target.direction)] {
      state->wait();
      link.free_from_now();
    });
  }
}

bool HostDevice::query(const Event& event) {
  auto state = host_event(event);
  return !state || state->query();
}

void HostDevice::synchronize(const Event& event) {
  auto state = host_event(event);
  if (!state) return;
  if (getpid() == owner_process_) {
    state->wait();
  } else if (!state->query()) {
    throw std::runtime_error(
        "host device: the event was pending when this process was forked; its work ends in the "
        "parent only. Call synchronize() before the fork");
  }
}

void HostDevice::host_callback(StreamId stream, std::function<void()> callback) {
  if (on_caller(stream)) {
    callback();
  } else {
    Stream& target = find(stream);
    target.queue.push([callback = std::move(callback), &link = link(target.direction)] {
      callback();
      link.free_from_now();
    });
  }
}

void HostDevice::when_complete(const Event& event, std::function<void()> callback) {
  auto state = host_event(event);
  if (state) {
    state->when_complete(std::move(callback));
  } else {
    callback();
  }
}

}  // namespace autohete
