// One direction of the link: takes copy jobs with a priority and runs them in chunks, at most two
// chunks in flight, so that a more urgent job overtakes a long one between chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
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
  std::string what;            // for the timeline; empty: "upload" or "download"
  bool merge = true;           // segments that follow each other in both memories are one copy
  Event after;                 // the first chunk starts after this event
  // Called once, on the lane's own thread, with null or what failed. The job's memory may be
  // reused from then on. Must not throw. It may submit to any lane; it must not destroy this one.
  std::function<void(std::exception_ptr)> done;
};

// Owns one thread and one device stream. Any thread may submit.
//
// A job whose `after` is not complete stands aside: jobs that are ready pass it whatever their
// priority. Many small segments share a chunk. A failed chunk ends its own job only. In a forked
// child submit() copies on the caller and calls done() before it returns.
class TransferLane {
 public:
  // `device` and `timeline` must outlive the lane. Throws std::invalid_argument when chunk_bytes
  // is 0.
  TransferLane(Device& device, CopyDirection direction, std::size_t chunk_bytes,
               Timeline* timeline = nullptr);
  // Finishes the chunks in flight, calls done() of everything left with an error, and joins. Takes
  // at most kCloseSeconds: a chunk that still has not ended is given up with an error that says so.
  ~TransferLane();
  TransferLane(const TransferLane&) = delete;
  TransferLane& operator=(const TransferLane&) = delete;

  static constexpr double kCloseSeconds = 4;
  static constexpr std::size_t kMaxChunksInFlight = 2;
  // A chunk is cut at this many copies too, however small they are.
  static constexpr std::size_t kMaxCopiesPerChunk = 64;

  // Throws std::invalid_argument when a segment with bytes has a null pointer. A job submitted by a
  // done() while the lane closes ends at once, with an error.
  void submit(CopyJob job);
  // Bytes of the chunks that have ended well.
  std::uint64_t bytes_moved() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace autohete
