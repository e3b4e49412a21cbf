// One side of the seam as the suites see it: a device, a store and the controls that tests need.
// side_host.cpp and side_cuda.cpp each define make_side(). Device memory is never read directly:
// on a GPU it cannot be.
#pragma once

#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "csrc/device/budget.h"
#include "csrc/device/device.h"
#include "csrc/device/store.h"
#include "tests/native/check.h"

namespace autohete::testing {

inline constexpr CopyDirection kUp = CopyDirection::kHostToDevice;
inline constexpr CopyDirection kDown = CopyDirection::kDeviceToHost;

struct SideOptions {
  std::size_t device_bytes = std::size_t{64} << 20;
  std::size_t host_bytes = std::size_t{64} << 20;
  bool pin = true;
};

class Side {
 public:
  virtual ~Side() = default;
  virtual Device& device() = 0;
  virtual Store& store() = 0;
  virtual Budget& device_budget() = 0;
  virtual Budget& host_budget() = 0;
  const std::vector<std::string>& warnings() const { return warnings_; }

  // False on a real GPU: cases that need the controls below skip themselves.
  virtual bool has_controls() const { return true; }
  virtual void hold(CopyDirection direction) = 0;
  virtual void release(CopyDirection direction, std::size_t num_copies) = 0;
  virtual void release_all(CopyDirection direction) = 0;
  virtual void random_delays(std::uint64_t seed, double max_seconds) = 0;
  virtual void fail_next_copy(CopyDirection direction) = 0;
  virtual void refuse_pinning(std::size_t after_bytes) = 0;

 protected:
  std::vector<std::string> warnings_;
};

std::unique_ptr<Side> make_side(const SideOptions& options = {});
inline std::unique_ptr<Side> make_side_with_controls(const SideOptions& options = {}) {
  auto side = make_side(options);
  if (!side->has_controls()) SKIP("a real GPU cannot be told to hold its copies");
  return side;
}

// Bytes that depend on the seed and the place, so that a shifted or mixed-up copy shows.
inline std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> result(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    result[i] = static_cast<std::byte>((i * 2654435761u + seed * 40503u) >> 13);
  }
  return result;
}

// Copies and waits, on a stream of its own.
inline void copy_now(Device& device, void* dst, const void* src, std::size_t bytes,
                     CopyDirection direction) {
  const StreamId stream = device.create_stream(direction);
  device.copy_async(dst, src, bytes, stream);
  device.synchronize(device.record(stream));
}
inline std::vector<std::byte> read_device(Device& device, const std::byte* data,
                                          std::size_t bytes) {
  std::vector<std::byte> result(bytes);
  copy_now(device, result.data(), data, bytes, kDown);
  return result;
}

// For waits that must end: a test that would hang fails instead.
template <typename T>
T get_soon(std::future<T> future) {
  if (future.wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
    throw check::Failure("still waiting after 60 s");
  }
  return future.get();
}

}  // namespace autohete::testing
