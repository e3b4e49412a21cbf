#include "csrc/device/host_link.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "csrc/base/check.h"

namespace autohete {

void HostLink::copy(void* dst, const void* src, std::size_t bytes, Clock::time_point queued_at,
                    const HostLink& other_direction) {
  pass_gate();
  const auto contended = other_direction.num_started() > other_direction.num_ended();
  const Clock::time_point end = reserve(bytes, queued_at, contended);
  std::memcpy(dst, src, bytes);
  if (end > Clock::now()) {
    // The wait is the emulated link; close() cuts it short.
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, end, [&] { return closed_; });
  }
  ++num_ended_;
}

void HostLink::free_from_now() {
  std::lock_guard lock(mutex_);
  free_from_ = Clock::now();
}

bool HostLink::is_free() {
  std::lock_guard lock(mutex_);
  return !closed_ && !held_ && failures_ == 0 && max_delay_seconds_ == 0 &&
         speed_.bytes_per_second == 0 && speed_.latency_seconds == 0;
}

void HostLink::pass_gate() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closed_ || !held_ || permits_ > 0; });
  if (closed_) throw std::runtime_error("host device: the copy was dropped, the device is closing");
  if (held_) --permits_;
  if (failures_ > 0) {
    --failures_;
    throw std::runtime_error("host device: the copy failed (a failure was injected)");
  }
  ++num_started_;
}

HostLink::Clock::time_point HostLink::reserve(std::size_t bytes, Clock::time_point queued_at,
                                              bool contended) {
  std::lock_guard lock(mutex_);
  double seconds = speed_.latency_seconds;
  if (speed_.bytes_per_second > 0) {
    const double speed = speed_.bytes_per_second * (contended ? speed_.duplex_factor : 1);
    seconds += static_cast<double>(bytes) / speed;
  }
  if (max_delay_seconds_ > 0) {
    seconds += std::uniform_real_distribution<double>(0, max_delay_seconds_)(random_);
  }
  const auto start = std::max({busy_until_, queued_at, free_from_});
  busy_until_ =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  return busy_until_;
}

void HostLink::set_speed(const LinkSpeed& speed) {
  require(speed.bytes_per_second >= 0 && speed.latency_seconds >= 0, "host link: speed is ",
          speed.bytes_per_second, " bytes/s and latency ", speed.latency_seconds,
          " s, expected 0 or more; 0 means no limit");
  require(speed.duplex_factor > 0 && speed.duplex_factor <= 1, "host link: duplex_factor is ",
          speed.duplex_factor,
          ", expected (0, 1]; 1 means that directions do not disturb each other");
  std::lock_guard lock(mutex_);
  speed_ = speed;
}

void HostLink::set_random_delays(std::uint64_t seed, double max_seconds) {
  require(max_seconds >= 0, "host link: max_seconds is ", max_seconds,
          ", expected 0 or more; 0 turns the delays off");
  std::lock_guard lock(mutex_);
  random_.seed(seed);
  max_delay_seconds_ = max_seconds;
}

void HostLink::hold() {
  std::lock_guard lock(mutex_);
  held_ = true;
  permits_ = 0;
}

void HostLink::release(std::size_t num_copies) {
  std::lock_guard lock(mutex_);
  permits_ += num_copies;
  free_from_ = Clock::now();
  changed_.notify_all();
}

void HostLink::release_all() {
  std::lock_guard lock(mutex_);
  held_ = false;
  free_from_ = Clock::now();
  changed_.notify_all();
}

void HostLink::fail_next(std::size_t num_copies) {
  std::lock_guard lock(mutex_);
  failures_ = num_copies;
}

void HostLink::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace autohete
