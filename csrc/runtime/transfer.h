// One direction of the link: takes copy jobs with a priority and runs them in chunks, at most two
// chunks in flight, so that a more urgent job overtakes a long one between chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/device/device.h"

namespace autohete {

class Timeline;

struct CopySegment {
  void* dst;
  const void* src;
  std::size_t bytes;
};

struct CopyJob {
  std::vector<CopySegment> segments;
  std::uint64_t priority = 0;  // smaller first; equal priorities in order of submission
  int unit = -1;               // for the timeline
  Event after;                 // the first chunk starts after this event
  // Called once, on the lane's own thread, with null or what failed. The job's memory may be
  // reused from then on. Must not throw.
  std::function<void(std::exception_ptr)> done;
};

// Owns one thread and one device stream. Any thread may submit. The destructor finishes the chunks
// in flight, calls done() of everything left with an error, and joins.
class TransferLane {
 public:
  TransferLane(Device& device, CopyDirection direction, std::size_t chunk_bytes,
               Timeline* timeline = nullptr);
  ~TransferLane();
  TransferLane(const TransferLane&) = delete;
  TransferLane& operator=(const TransferLane&) = delete;

  void submit(CopyJob job);
  std::uint64_t bytes_moved() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace autohete
