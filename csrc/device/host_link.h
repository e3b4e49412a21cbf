// One direction of the host device's link: copies bytes as fast as it is told to, and holds, delays
// or fails them when a test says so.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>

namespace autohete {

struct LinkSpeed {
  double bytes_per_second = 0;  // 0: as fast as memory allows
  double latency_seconds = 0;   // of each copy
  // Part of the speed that is left while the other direction is copying too, in (0, 1].
  double duplex_factor = 1;
};

// Any thread. `mutex_` guards everything but the atomics.
class HostLink {
 public:
  using Clock = std::chrono::steady_clock;

  // Copies and blocks for as long as the link would take: the copy ends no earlier than its start
  // + latency + bytes / speed, and copies of one direction follow each other. One that was queued
  // when the one before ended starts there, however late this thread wakes: the link keeps its
  // speed. Throws std::runtime_error when a failure was asked for or the link is closed.
  void copy(void* dst, const void* src, std::size_t bytes, Clock::time_point queued_at,
            const HostLink& other_direction);
  // Copies were held back by something else until now: none starts earlier.
  void free_from_now();

  // Whether a copy takes no longer than memory does: no speed is stated, and no test wants
  // anything.
  bool is_free();

  // Speed of the copies that start from now on. Throws std::invalid_argument.
  void set_speed(const LinkSpeed& speed);
  // Adds a delay in [0, max_seconds) to each copy, the same row of delays for the same seed.
  void set_random_delays(std::uint64_t seed, double max_seconds);

  // Test controls. While held, copies stay queued; release(n) lets n of them go.
  void hold();
  void release(std::size_t num_copies);
  void release_all();  // ends the hold
  void fail_next(std::size_t num_copies);

  // Ends every hold and delay; later copies throw. Called before the device's threads are joined.
  void close();

  // Copies that have started, held ones excluded; and those that have ended.
  std::size_t num_started() const { return num_started_; }
  std::size_t num_ended() const { return num_ended_; }

 private:
  void pass_gate();  // takes the lock
  Clock::time_point reserve(std::size_t bytes, Clock::time_point queued_at,
                            bool contended);  // takes the lock

  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  bool held_ = false;
  std::size_t permits_ = 0;   // copies let through while held
  std::size_t failures_ = 0;  // copies still to fail
  LinkSpeed speed_;
  double max_delay_seconds_ = 0;
  std::mt19937_64 random_;
  Clock::time_point busy_until_{};
  Clock::time_point free_from_{};
  std::atomic<std::size_t> num_started_{0};
  std::atomic<std::size_t> num_ended_{0};
};

}  // namespace autohete
