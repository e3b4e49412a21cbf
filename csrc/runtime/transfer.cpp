// Over 350 lines: the queue, the chunks in flight and the thread are one machine.
#include "csrc/runtime/transfer.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <mutex>
#include <queue>
#include <stdexcept>
#include <thread>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/runtime/timeline.h"

namespace autohete {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLookAnyway{500};

// Becomes true when the device calls back that an event is over.
using Notice = std::shared_ptr<std::atomic<bool>>;

// A job and how far its copies have been issued.
struct Progress {
  Progress(CopyJob&& given, std::uint64_t order) : job(std::move(given)), order(order) {}

  bool all_issued() const { return segment == job.segments.size(); }
  bool over() const { return chunks_in_flight == 0 && (failure || all_issued()); }

  CopyJob job;
  const std::uint64_t order;
  std::size_t segment = 0;  // the next byte to copy is
  std::size_t offset = 0;   // job.segments[segment], at offset
  std::size_t chunks_in_flight = 0;
  std::size_t bytes_issued = 0;
  double start_seconds = 0;
  std::exception_ptr failure;
  Notice after_is_over;  // null: nobody has asked the device to wake the lane yet
};
using ProgressPtr = std::shared_ptr<Progress>;

struct LessUrgent {
  bool operator()(const ProgressPtr& a, const ProgressPtr& b) const {
    return std::pair(a->job.priority, a->order) > std::pair(b->job.priority, b->order);
  }
};

struct Chunk {
  ProgressPtr owner;
  Event end;
  std::size_t bytes;
  Notice is_over;
};

// The next copy of a job: up to `limit` bytes from where it stands, over segments that may be
// merged. Moves the job on.
CopySegment take_copy(Progress& progress, std::size_t limit) {
  const auto& segments = progress.job.segments;
  const CopySegment& first = segments[progress.segment];
  CopySegment copy{static_cast<std::byte*>(first.dst) + progress.offset,
                   static_cast<const std::byte*>(first.src) + progress.offset, 0};
  while (copy.bytes < limit && !progress.all_issued()) {
    const CopySegment& next = segments[progress.segment];
    const bool follows = static_cast<std::byte*>(copy.dst) + copy.bytes ==
                             static_cast<std::byte*>(next.dst) + progress.offset &&
                         static_cast<const std::byte*>(copy.src) + copy.bytes ==
                             static_cast<const std::byte*>(next.src) + progress.offset;
    if (!follows) break;
    const std::size_t taken = std::min(limit - copy.bytes, next.bytes - progress.offset);
    copy.bytes += taken;
    progress.offset += taken;
    if (progress.offset < next.bytes) continue;
    ++progress.segment, progress.offset = 0;
    if (!progress.job.merge) break;
  }
  return copy;
}

// How other threads reach the lane's thread. Shared with the device's callbacks, so that one that
// comes late finds it alive.
class Doorbell {
 public:
  struct Ring {
    std::vector<ProgressPtr> submitted;
    bool closing = false;
  };

  // False, and the job is left alone, once close() was called.
  bool submit(CopyJob& job) {
    {
      std::lock_guard lock(mutex_);
      if (pending_.closing) return false;
      pending_.submitted.push_back(std::make_shared<Progress>(std::move(job), next_order_++));
      ringing_ = true;
    }
    rung_.notify_one();
    return true;
  }
  void ring() {
    {
      std::lock_guard lock(mutex_);
      ringing_ = true;
    }
    rung_.notify_one();
  }
  void close() {
    {
      std::lock_guard lock(mutex_);
      pending_.closing = true;
      ringing_ = true;
    }
    rung_.notify_one();
  }
  // Blocks until something happened or `deadline` has passed.
  Ring answer(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    if (deadline == Clock::time_point::max()) {
      rung_.wait(lock, [&] { return ringing_; });
    } else {
      rung_.wait_until(lock, deadline, [&] { return ringing_; });
    }
    ringing_ = false;
    Ring result{std::move(pending_.submitted), pending_.closing};
    pending_.submitted.clear();
    return result;
  }

 private:
  std::mutex mutex_;  // guards all members
  // Rung without the lock: whoever wakes takes it at once. Whoever rings keeps the bell.
  std::condition_variable rung_;
  bool ringing_ = false;
  Ring pending_;
  std::uint64_t next_order_ = 0;
};

std::exception_ptr closed_error(const char* state) {
  return std::make_exception_ptr(std::runtime_error(concat("transfer lane: closed ", state)));
}

}  // namespace

// Everything but the doorbell and the counter belongs to the lane's thread.
struct TransferLane::Impl {
  Impl(Device& device, CopyDirection direction, std::size_t chunk_bytes, Timeline* timeline)
      : device(device),
        direction(direction),
        chunk_bytes(chunk_bytes),
        timeline(timeline),
        stream(device.create_stream(direction)),
        thread([this] { run(); }) {}

  void run();
  void promote_waiting();
  void watch_waiting();
  void retire_chunks();
  void issue_chunks();
  void issue_chunk(const ProgressPtr& progress);
  void finish(Progress& progress);
  void close();
  void copy_on_caller(CopyJob job);
  Notice wake_when(const Event& event);
  bool is_over(const Event& event, const Notice& notice);

  Device& device;
  const CopyDirection direction;
  const std::size_t chunk_bytes;
  Timeline* const timeline;
  const StreamId stream;
  const pid_t owner_process = getpid();
  const std::shared_ptr<Doorbell> doorbell = std::make_shared<Doorbell>();
  std::atomic<std::uint64_t> bytes_moved{0};

  std::vector<ProgressPtr> waiting;  // for their `after`, in order of submission
  std::priority_queue<ProgressPtr, std::vector<ProgressPtr>, LessUrgent> ready;
  std::deque<Chunk> in_flight;
  std::thread thread;  // last: it uses the members above
};

void TransferLane::Impl::run() {
#ifdef __linux__
  pthread_setname_np(pthread_self(),
                     direction == CopyDirection::kHostToDevice ? "ah-h2d" : "ah-d2h");
#endif
  for (;;) {
    // A device that broke down runs no more callbacks (CUDA): look now and then all the same.
    const bool pending = !waiting.empty() || !in_flight.empty();
    Doorbell::Ring ring =
        doorbell->answer(pending ? Clock::now() + kLookAnyway : Clock::time_point::max());
    std::move(ring.submitted.begin(), ring.submitted.end(), std::back_inserter(waiting));
    if (ring.closing) break;
    promote_waiting();
    retire_chunks();
    issue_chunks();
    watch_waiting();
  }
  close();
}

// Moves the jobs whose event is complete to the queue, and ends those whose event failed.
void TransferLane::Impl::promote_waiting() {
  std::vector<ProgressPtr> candidates = std::exchange(waiting, {});
  for (ProgressPtr& progress : candidates) {
    bool complete = false;
    try {
      complete = is_over(progress->job.after, progress->after_is_over);
    } catch (...) {
      progress->failure = std::current_exception();
      finish(*progress);
      continue;
    }
    if (complete) {
      ready.push(std::move(progress));
    } else {
      waiting.push_back(std::move(progress));
    }
  }
}

// Asks the device to wake the lane for the waiting jobs. Of events that complete in a known order
// only the first is watched: the next is when that one has come, so that few waits are pending.
void TransferLane::Impl::watch_waiting() {
  for (const ProgressPtr& progress : waiting) {
    if (progress->after_is_over) continue;
    const bool covered = std::any_of(waiting.begin(), waiting.end(), [&](const auto& other) {
      return other->after_is_over && other->job.after.completes_by(progress->job.after);
    });
    if (!covered) progress->after_is_over = wake_when(progress->job.after);
  }
}

// Where the device cannot call back, the lane waits itself: slower for the others, never stuck.
Notice TransferLane::Impl::wake_when(const Event& event) {
  auto notice = std::make_shared<std::atomic<bool>>(false);
  const auto ring = [doorbell = doorbell, notice] {
    *notice = true;
    doorbell->ring();
  };
  try {
    device.when_complete(event, ring);
    return notice;
  } catch (const std::exception&) {
  }
  try {
    device.synchronize(event);
  } catch (const std::exception&) {  // is_over() says the same to whoever needs to know
  }
  ring();
  return notice;
}

// Rethrows the failure of what the event stands for. After the device's call nothing is left to
// wait for; synchronize() is asked all the same, for the failure, and because it is the one call
// after which every runtime counts an event as complete.
bool TransferLane::Impl::is_over(const Event& event, const Notice& notice) {
  if (!notice || !*notice) return device.query(event);
  device.synchronize(event);
  return true;
}

void TransferLane::Impl::retire_chunks() {
  while (!in_flight.empty()) {
    Chunk& chunk = in_flight.front();
    try {
      if (!is_over(chunk.end, chunk.is_over)) return;
      bytes_moved += chunk.bytes;
    } catch (...) {
      if (!chunk.owner->failure) chunk.owner->failure = std::current_exception();
    }
    const ProgressPtr owner = std::move(chunk.owner);
    in_flight.pop_front();
    --owner->chunks_in_flight;
    if (owner->over()) finish(*owner);
  }
}

void TransferLane::Impl::issue_chunks() {
  while (in_flight.size() < kMaxChunksInFlight && !ready.empty()) {
    const ProgressPtr progress = ready.top();
    if (progress->failure) {  // of an earlier chunk: retire_chunks() ends the job
      ready.pop();
      continue;
    }
    issue_chunk(progress);
    if (progress->failure || progress->all_issued()) ready.pop();
    if (progress->over()) finish(*progress);
  }
}

// Queues one chunk of the job. What was queued before something failed is waited for all the same.
void TransferLane::Impl::issue_chunk(const ProgressPtr& progress) {
  if (progress->start_seconds == 0) progress->start_seconds = Timeline::now();
  std::size_t bytes = 0;
  std::size_t copies = 0;
  try {
    while (bytes < chunk_bytes && copies < kMaxCopiesPerChunk && !progress->all_issued()) {
      const CopySegment copy = take_copy(*progress, chunk_bytes - bytes);
      if (copy.bytes == 0) continue;
      device.copy_async(copy.dst, copy.src, copy.bytes, stream);
      bytes += copy.bytes;
      ++copies;
    }
  } catch (...) {
    progress->failure = std::current_exception();
  }
  if (copies == 0) return;
  try {
    in_flight.push_back({progress, device.record(stream), bytes, nullptr});
  } catch (...) {
    if (!progress->failure) progress->failure = std::current_exception();
    return;
  }
  ++progress->chunks_in_flight;
  progress->bytes_issued += bytes;
  in_flight.back().is_over = wake_when(in_flight.back().end);
}

void TransferLane::Impl::finish(Progress& progress) {
  if (timeline && !progress.failure && progress.start_seconds > 0) {
    const bool up = direction == CopyDirection::kHostToDevice;
    std::string what = progress.job.what;
    if (what.empty()) what = up ? "upload" : "download";
    timeline->add({up ? Lane::kHostToDevice : Lane::kDeviceToHost, progress.job.unit,
                   std::move(what), progress.start_seconds, Timeline::now(),
                   progress.bytes_issued});
  }
  // Moved out first: what the callback holds (blocks, say) is freed when it returns.
  const auto done = std::move(progress.job.done);
  if (done) done(progress.failure);
}

// The jobs not fully issued end with an error; the chunks in flight are waited for.
void TransferLane::Impl::close() {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(kCloseSeconds));
  for (; !ready.empty(); ready.pop()) waiting.push_back(ready.top());
  for (const ProgressPtr& progress : waiting) {
    if (progress->failure) continue;  // of an earlier chunk: retire_chunks() ends the job
    progress->failure = closed_error("before the copy was complete");
    if (progress->over()) finish(*progress);
  }
  waiting.clear();
  for (retire_chunks(); !in_flight.empty() && Clock::now() < deadline; retire_chunks()) {
    doorbell->answer(deadline);
  }
  while (!in_flight.empty()) {
    const ProgressPtr owner = std::move(in_flight.front().owner);
    in_flight.pop_front();
    owner->failure = closed_error(
        "while the device still had not ended the copy; its memory may yet be written to");
    if (--owner->chunks_in_flight == 0) finish(*owner);
  }
}

// In a forked child: the lane's thread stayed in the parent.
void TransferLane::Impl::copy_on_caller(CopyJob job) {
  std::exception_ptr failure;
  try {
    device.synchronize(job.after);
    for (const CopySegment& segment : job.segments) {
      device.copy_async(segment.dst, segment.src, segment.bytes, stream);
    }
    device.synchronize(device.record(stream));
  } catch (...) {
    failure = std::current_exception();
  }
  if (job.done) job.done(failure);
}

TransferLane::TransferLane(Device& device, CopyDirection direction, std::size_t chunk_bytes,
                           Timeline* timeline) {
  require(chunk_bytes > 0, "transfer lane: chunk_bytes is 0, expected at least 1");
  impl_ = std::make_unique<Impl>(device, direction, chunk_bytes, timeline);
}

TransferLane::~TransferLane() {
  if (getpid() != impl_->owner_process) {
    (void)impl_.release();  // its thread and whoever held its locks stayed in the parent
    return;
  }
  impl_->doorbell->close();
  impl_->thread.join();
}

void TransferLane::submit(CopyJob job) {
  for (const CopySegment& segment : job.segments) {
    require(segment.bytes == 0 || (segment.dst && segment.src), "transfer lane: a segment of ",
            segment.bytes, " bytes has a null ", segment.dst ? "src" : "dst", ", expected memory");
  }
  if (getpid() != impl_->owner_process) return impl_->copy_on_caller(std::move(job));
  // Kept here: the job may be over, and the lane destroyed, before the bell has rung.
  const std::shared_ptr<Doorbell> doorbell = impl_->doorbell;
  if (!doorbell->submit(job) && job.done) job.done(closed_error("before the job was submitted"));
}

std::uint64_t TransferLane::bytes_moved() const { return impl_->bytes_moved; }

}  // namespace autohete
