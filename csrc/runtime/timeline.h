// What ran when: spans of the lanes, for report() and trace(). Recording costs a clock read and a
// locked push; nothing is recorded while disabled.
#pragma once

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
  void enable(bool on) {
    std::lock_guard lock(mutex_);
    enabled_ = on;
  }
  void add(TimelineSpan span) {
    std::lock_guard lock(mutex_);
    if (enabled_ && spans_.size() < kMaxSpans) spans_.push_back(std::move(span));
  }
  // The spans so far; clears them.
  std::vector<TimelineSpan> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(spans_, {});
  }

 private:
  static constexpr std::size_t kMaxSpans = 1 << 20;
  std::mutex mutex_;  // guards both
  bool enabled_ = false;
  std::vector<TimelineSpan> spans_;
};

}  // namespace autohete
