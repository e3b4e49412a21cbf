// What ran when: spans of the lanes, for report() and trace(). Recording costs a clock read and a
// locked push; while disabled only each lane's busy time is added up.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace autohete {

enum class Lane : std::uint8_t { kCompute, kHostToDevice, kDeviceToHost, kCpu };

struct TimelineSpan {
  Lane lane;
  int unit;              // -1: no unit
  std::string what;      // "forward", "upload", "gradients", "update", "wait", ...
  double start_seconds;  // of the steady clock
  double end_seconds;
  std::size_t bytes;
};

class Timeline {
 public:
  static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
  }
  static std::chrono::steady_clock::time_point time_at(double seconds) {
    using namespace std::chrono;
    return steady_clock::time_point(
        duration_cast<steady_clock::duration>(duration<double>(seconds)));
  }
  void enable(bool on) {
    std::lock_guard lock(mutex_);
    enabled_ = on;
  }
  void add(TimelineSpan span) {
    std::lock_guard lock(mutex_);
    Busy& busy = busy_[static_cast<std::size_t>(span.lane)];
    busy.seconds += std::max(0.0, span.end_seconds - std::max(span.start_seconds, busy.until));
    busy.until = std::max(busy.until, span.end_seconds);
    if (enabled_ && spans_.size() < kMaxSpans) spans_.push_back(std::move(span));
  }
  // Seconds with a span, by lane, since the beginning; of the compute lane: with a wait. (Chunks of
  // two transfers overlap; spans come in the order of their ends, so that counts once.)
  std::array<double, 4> busy_seconds() {
    std::lock_guard lock(mutex_);
    return {busy_[0].seconds, busy_[1].seconds, busy_[2].seconds, busy_[3].seconds};
  }
  // The spans so far; clears them.
  std::vector<TimelineSpan> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(spans_, {});
  }

 private:
  static constexpr std::size_t kMaxSpans = 1 << 20;
  struct Busy {
    double seconds = 0, until = 0;
  };
  std::mutex mutex_;  // guards everything below
  std::array<Busy, 4> busy_;
  bool enabled_ = false;
  std::vector<TimelineSpan> spans_;
};

}  // namespace autohete
