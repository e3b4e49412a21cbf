// What the transfer lanes promise (transfer.h), on whichever side is linked in.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "csrc/runtime/timeline.h"
#include "csrc/runtime/transfer.h"
#include "tests/native/side.h"

namespace autohete::testing {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::size_t kChunk = 1 << 12;

// Passes everything on to another device; writes the copies down, and fails the calls it is told
// to.
class RecordingDevice final : public Device {
 public:
  explicit RecordingDevice(Device& device) : device_(device) {}

  DeviceCapabilities capabilities() const override { return device_.capabilities(); }
  StreamId create_stream(CopyDirection direction) override {
    return device_.create_stream(direction);
  }
  void set_compute_stream(std::uintptr_t stream) override { device_.set_compute_stream(stream); }
  void copy_async(void* dst, const void* src, std::size_t bytes, StreamId stream) override {
    {
      std::lock_guard lock(mutex_);
      if (copies_until_failure_ > 0 && --copies_until_failure_ == 0) {
        throw std::runtime_error("copy_async refused");
      }
      copies_.push_back({dst, src, bytes});
    }
    device_.copy_async(dst, src, bytes, stream);
  }
  Event record(StreamId stream) override {
    if (fail_record.exchange(false)) throw std::runtime_error("record refused");
    return device_.record(stream);
  }
  void wait(StreamId stream, const Event& event) override { device_.wait(stream, event); }
  bool query(const Event& event) override { return device_.query(event); }
  void synchronize(const Event& event) override { device_.synchronize(event); }
  void host_callback(StreamId stream, std::function<void()> callback) override {
    device_.host_callback(stream, std::move(callback));
  }
  void when_complete(const Event& event, std::function<void()> callback) override {
    ++num_watched;
    if (fail_when_complete) throw std::runtime_error("when_complete refused");
    device_.when_complete(event, std::move(callback));
  }

  std::vector<CopySegment> copies() const {
    std::lock_guard lock(mutex_);
    return copies_;
  }
  void fail_copy(std::size_t nth) {
    std::lock_guard lock(mutex_);
    copies_until_failure_ = nth;
  }
  std::atomic<bool> fail_record{false}, fail_when_complete{false};
  std::atomic<int> num_watched{0};

 private:
  Device& device_;
  mutable std::mutex mutex_;  // guards the two below
  std::vector<CopySegment> copies_;
  std::size_t copies_until_failure_ = 0;
};

// A side, a recording device over it, and what the jobs reported, in order.
struct Bench {
  explicit Bench(bool controls = true)
      : side(controls ? make_side_with_controls() : make_side()), device(side->device()) {}

  // A job that copies `bytes` from host memory into a fresh device block.
  CopyJob upload(std::string name, const Bytes& bytes, std::uint64_t priority = 0) {
    blocks[name] = side->store().allocate_device(bytes.size(), name);
    CopyJob job;
    job.segments = {{blocks[name]->data(), bytes.data(), bytes.size()}};
    job.priority = priority;
    job.done = report(name);
    return job;
  }
  std::function<void(std::exception_ptr)> report(std::string name) {
    return [this, name](std::exception_ptr failure) {
      std::string result = "good";
      try {
        if (failure) std::rethrow_exception(failure);
      } catch (const std::exception& error) {
        result = error.what();
      }
      std::lock_guard lock(mutex);
      order.push_back(name);
      results[name].push_back(result);
      changed.notify_all();
    };
  }
  void wait_for(std::size_t num_done) {
    std::unique_lock lock(mutex);
    if (!changed.wait_for(lock, std::chrono::seconds(60),
                          [&] { return order.size() >= num_done; })) {
      check::fail(__FILE__, __LINE__, order.size(), " of ", num_done, " jobs done after 60 s");
    }
  }
  std::string result(const std::string& name) {
    std::lock_guard lock(mutex);
    if (results[name].size() != 1) {
      check::fail(__FILE__, __LINE__, name, " was done ", results[name].size(), " times");
    }
    return results[name][0];
  }
  std::vector<std::string> done_order() {
    std::lock_guard lock(mutex);
    return order;
  }
  Bytes read(const std::string& name) {
    return read_device(side->device(), blocks[name]->data(), blocks[name]->bytes());
  }
  // Waits until the lane has asked the device for `count` copies in all.
  void wait_for_copies(std::size_t count) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (device.copies().size() < count) {
      if (std::chrono::steady_clock::now() > limit) {
        check::fail(__FILE__, __LINE__, device.copies().size(), " copies, expected ", count);
      }
      std::this_thread::yield();
    }
  }

  // Waits until the lane has queued all that was submitted to it, while `num_in_flight` chunks are
  // in flight. Copies down are held from then on, by a job that waits for one.
  void wait_until_queued(TransferLane& lane, int num_in_flight) {
    side->hold(kDown);
    CopyJob last = upload("last", last_bytes);
    const StreamId down = side->device().create_stream(kDown);
    side->device().copy_async(last_bytes.data(), blocks["last"]->data(), last_bytes.size(), down);
    last.after = side->device().record(down);
    lane.submit(std::move(last));
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (device.num_watched < num_in_flight + 1) {  // each chunk's end, and the last job's event
      if (std::chrono::steady_clock::now() > limit) {
        check::fail(__FILE__, __LINE__, device.num_watched.load(),
                    " events are watched after 60 s");
      }
      std::this_thread::yield();
    }
  }

  Bytes last_bytes = Bytes(64);
  std::map<std::string, BlockPtr> blocks;  // before the side: copies may run until that is gone
  std::unique_ptr<Side> side;
  RecordingDevice device;
  std::mutex mutex;  // guards the three below
  std::condition_variable changed;
  std::vector<std::string> order;
  std::map<std::string, std::vector<std::string>> results;
};

const auto kNames = [](std::initializer_list<const char*> names) {
  return std::vector<std::string>(names.begin(), names.end());
};

TEST_CASE("every byte of a job arrives and none beside it, at the edges of a chunk") {
  Bench bench(false);
  TransferLane up(bench.device, kUp, kChunk), down(bench.device, kDown, kChunk);
  constexpr std::size_t kMargin = 32;
  std::size_t moved = 0, jobs = 0;
  for (std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, kChunk - 1, kChunk, kChunk + 1, 3 * kChunk + 5}) {
    BlockPtr block = bench.side->store().allocate_device(bytes + 2 * kMargin, "test");
    const Bytes around = pattern(block->bytes(), 9), sent = pattern(bytes, 2);
    Bytes received = pattern(block->bytes(), 4);
    copy_now(bench.side->device(), block->data(), around.data(), around.size(), kUp);
    up.submit(
        {.segments = {{block->data() + kMargin, sent.data(), bytes}}, .done = bench.report("up")});
    bench.wait_for(++jobs);
    Bytes expected = around;
    std::copy(sent.begin(), sent.end(), expected.begin() + kMargin);
    CHECK(read_device(bench.side->device(), block->data(), block->bytes()) == expected);
    expected = received;
    std::copy(sent.begin(), sent.end(), expected.begin() + kMargin);
    down.submit({.segments = {{received.data() + kMargin, block->data() + kMargin, bytes}},
                 .done = bench.report("down")});
    bench.wait_for(++jobs);
    CHECK(received == expected);
    moved += bytes;
    CHECK_EQ(up.bytes_moved(), moved);
    CHECK_EQ(down.bytes_moved(), moved);
  }
  for (const CopySegment& copy : bench.device.copies()) {
    CHECK(copy.bytes > 0 && copy.bytes <= kChunk);
  }
}

TEST_CASE("a job without bytes is done without a copy") {
  Bench bench(false);
  TransferLane lane(bench.device, kUp, kChunk);
  lane.submit({.segments = {}, .done = bench.report("none")});
  lane.submit({.segments = {{nullptr, nullptr, 0}}, .done = bench.report("empty")});
  lane.submit({.segments = {}, .done = {}});  // nobody to tell
  bench.wait_for(2);
  CHECK_EQ(bench.result("none"), "good");
  CHECK_EQ(bench.result("empty"), "good");
  CHECK_EQ(bench.device.copies().size(), std::size_t{0});
}

TEST_CASE("scattered segments arrive each in its place") {
  Bench bench(false);
  TransferLane lane(bench.device, kUp, kChunk);
  BlockPtr block = bench.side->store().allocate_device(1 << 20, "test");
  Bytes expected = pattern(block->bytes(), 1);
  copy_now(bench.side->device(), block->data(), expected.data(), expected.size(), kUp);
  const Bytes sent = pattern(1 << 20, 2);
  std::mt19937 random(5);
  CopyJob job;
  for (std::size_t at = 0; at + 9000 < expected.size(); at += 9000) {
    const std::size_t bytes = random() % 8999, from = random() % (sent.size() - bytes);
    job.segments.push_back({block->data() + at, sent.data() + from, bytes});
    std::copy_n(sent.begin() + from, bytes, expected.begin() + at);
  }
  job.done = bench.report("job");
  lane.submit(std::move(job));
  bench.wait_for(1);
  CHECK(read_device(bench.side->device(), block->data(), block->bytes()) == expected);
}

TEST_CASE("segments that follow each other are one copy") {
  Bench bench(false);
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(1000, 1);
  CopyJob job = bench.upload("job", sent);
  std::byte* dst = static_cast<std::byte*>(job.segments[0].dst);
  job.segments.clear();
  for (std::size_t at = 0; at < 1000; at += 10) {
    job.segments.push_back({dst + at, sent.data() + at, 10});
  }
  lane.submit(std::move(job));
  bench.wait_for(1);
  CHECK_EQ(bench.device.copies().size(), std::size_t{1});
  CHECK(bench.read("job") == sent);
}

TEST_CASE("many small segments share a chunk, up to a number of copies") {
  Bench bench;
  bench.side->hold(kUp);
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(4000, 1);
  CopyJob job = bench.upload("job", sent);
  std::byte* dst = static_cast<std::byte*>(job.segments[0].dst);
  job.segments.clear();
  for (std::size_t at = 0; at < 4000; at += 10) {  // in reverse, so that none follows the last
    job.segments.push_back({dst + 3990 - at, sent.data() + 3990 - at, 10});
  }
  lane.submit(std::move(job));
  bench.wait_for_copies(2 * TransferLane::kMaxCopiesPerChunk);
  CHECK_EQ(bench.device.copies().size(), 2 * TransferLane::kMaxCopiesPerChunk);
  bench.side->release_all(kUp);
  bench.wait_for(1);
  CHECK_EQ(bench.device.copies().size(), std::size_t{400});
  CHECK(bench.read("job") == sent);
}

TEST_CASE("at most two chunks are in flight") {
  Bench bench;
  bench.side->hold(kUp);
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(6 * kChunk, 1);
  lane.submit(bench.upload("job", sent));
  for (std::size_t ended = 0; ended < 4; ++ended) {
    bench.wait_for_copies(ended + 2);
    const StreamId other = bench.side->device().create_stream(kDown);  // time for a third to show
    bench.side->device().synchronize(bench.side->device().record(other));
    CHECK_EQ(bench.device.copies().size(), ended + 2);
    bench.side->release(kUp, 1);
  }
  bench.side->release_all(kUp);
  bench.wait_for(1);
  CHECK(bench.read("job") == sent);
}

TEST_CASE("smaller priorities go first, equal ones in order of submission") {
  Bench bench;
  bench.side->hold(kUp);
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(kChunk, 1);
  lane.submit(bench.upload("first", sent, 100));
  lane.submit(bench.upload("second", sent, 100));
  bench.wait_for_copies(2);  // these two are in flight
  lane.submit(bench.upload("b3", sent, 3));
  lane.submit(bench.upload("a2", sent, 2));
  lane.submit(bench.upload("c3", sent, 3));
  lane.submit(bench.upload("d2", sent, 2));
  lane.submit(bench.upload("e0", sent, 0));
  bench.wait_until_queued(lane, 2);
  bench.side->release_all(kUp);
  bench.wait_for(7);
  CHECK(bench.done_order() == kNames({"first", "second", "e0", "a2", "d2", "b3", "c3"}));
  bench.side->release_all(kDown);
}

TEST_CASE("an urgent job overtakes a long one between its chunks") {
  Bench bench;
  bench.side->hold(kUp);
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(8 * kChunk, 1), urgent = pattern(kChunk, 2);
  lane.submit(bench.upload("long", sent, 5));
  bench.wait_for_copies(2);
  lane.submit(bench.upload("urgent", urgent, 1));
  bench.wait_until_queued(lane, 2);
  bench.side->release_all(kUp);
  bench.wait_for(2);
  CHECK(bench.done_order() == kNames({"urgent", "long"}));
  bench.side->release_all(kDown);
  const auto copies = bench.device.copies();
  const auto place = std::find_if(copies.begin(), copies.end(), [&](const CopySegment& copy) {
    return copy.src == urgent.data();
  });
  CHECK(place - copies.begin() <= 3);  // behind the two in flight and at most one just issued
  CHECK(bench.read("long") == sent);
  CHECK(bench.read("urgent") == urgent);
}

TEST_CASE("a job does not start before its event and holds up no job that is ready") {
  Bench bench;
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(3 * kChunk, 1);
  Bytes scratch(256);
  BlockPtr block = bench.side->store().allocate_device(256, "test");
  const StreamId down = bench.side->device().create_stream(kDown);
  bench.side->hold(kDown);
  bench.side->device().copy_async(scratch.data(), block->data(), 256, down);
  CopyJob waiting = bench.upload("waiting", sent, 0);
  waiting.after = bench.side->device().record(down);
  lane.submit(std::move(waiting));
  lane.submit(bench.upload("ready 1", sent, 7));
  lane.submit(bench.upload("ready 2", sent, 9));
  bench.wait_for(2);
  CHECK(bench.done_order() == kNames({"ready 1", "ready 2"}));
  CHECK_EQ(bench.device.copies().size(), std::size_t{6});
  bench.side->release_all(kDown);
  bench.wait_for(3);
  CHECK(bench.read("waiting") == sent);
}

TEST_CASE("jobs start as their events come, whatever the order of submission") {
  Bench bench;
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(64, 1);
  Bytes scratch(256);
  BlockPtr block = bench.side->store().allocate_device(256, "test");
  const StreamId down = bench.side->device().create_stream(kDown);
  bench.side->hold(kDown);
  std::vector<Event> events;
  for (int i = 0; i < 5; ++i) {
    bench.side->device().copy_async(scratch.data(), block->data(), 256, down);
    events.push_back(bench.side->device().record(down));
  }
  for (int i : {3, 1, 4, 0, 2}) {
    CopyJob job = bench.upload(std::to_string(i), sent);
    job.after = events[i];
    lane.submit(std::move(job));
  }
  for (std::size_t i = 0; i < 5; ++i) {
    bench.side->release(kDown, 1);
    bench.wait_for(i + 1);
    CHECK_EQ(bench.done_order().back(), std::to_string(i));
  }
  CHECK(bench.device.num_watched <= 5 + 5);  // one for each chunk, at most one for each event
}

TEST_CASE("of many events of one stream only the first is watched") {
  Bench bench;
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(64, 1);
  Bytes scratch(256);
  BlockPtr block = bench.side->store().allocate_device(256, "test");
  const StreamId down = bench.side->device().create_stream(kDown);
  bench.side->hold(kDown);
  for (int i = 0; i < 20; ++i) {
    bench.side->device().copy_async(scratch.data(), block->data(), 256, down);
    CopyJob job = bench.upload(std::to_string(i), sent);
    job.after = bench.side->device().record(down);
    lane.submit(std::move(job));
  }
  lane.submit(bench.upload("ready", sent));
  bench.wait_for(1);  // the lane has seen them all
  CHECK(bench.device.num_watched <= 2);
  bench.side->release_all(kDown);
  bench.wait_for(21);
  for (int i = 0; i < 20; ++i) CHECK_EQ(bench.result(std::to_string(i)), "good");
}

TEST_CASE("a failed chunk ends its own job, once, and no other") {
  Bench bench;
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(5 * kChunk, 1);
  bench.side->fail_next_copy(kUp);
  lane.submit(bench.upload("bad", sent));
  lane.submit(bench.upload("good", sent));
  bench.wait_for(2);
  CHECK(bench.result("bad") != "good");
  CHECK_EQ(bench.result("good"), "good");
  CHECK(bench.read("good") == sent);
}

TEST_CASE("a copy that is refused half-way ends the job after the copies before it") {
  Bench bench;
  bench.side->hold(kUp);
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(300, 1);
  CopyJob job = bench.upload("bad", sent);
  std::byte* dst = static_cast<std::byte*>(job.segments[0].dst);
  job.segments = {{dst + 200, sent.data() + 200, 100}, {dst, sent.data(), 100}};
  bench.device.fail_copy(2);
  lane.submit(std::move(job));
  bench.wait_for_copies(1);
  lane.submit(bench.upload("good", sent, 1));
  bench.wait_for_copies(2);  // issued, so the lane knows of the failure by now
  CHECK_EQ(bench.done_order().size(), std::size_t{0});  // a copy of "bad" is still under way
  bench.side->release_all(kUp);
  bench.wait_for(2);
  CHECK_EQ(bench.result("bad"), "copy_async refused");
  CHECK_EQ(bench.result("good"), "good");
}

TEST_CASE("a refused record ends the job with its error") {
  Bench bench(false);
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(kChunk, 1);
  bench.device.fail_record = true;
  lane.submit(bench.upload("bad", sent));
  bench.wait_for(1);
  lane.submit(bench.upload("good", sent));
  bench.wait_for(2);
  CHECK_EQ(bench.result("bad"), "record refused");
  CHECK_EQ(bench.result("good"), "good");
}

TEST_CASE("where the device refuses callbacks the lane waits itself") {
  Bench bench(false);
  bench.device.fail_when_complete = true;
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(5 * kChunk, 1);
  lane.submit(bench.upload("job", sent));
  bench.wait_for(1);
  CHECK_EQ(bench.result("job"), "good");
  CHECK(bench.read("job") == sent);
}

TEST_CASE("a failed event ends the jobs that wait for it") {
  Bench bench;
  TransferLane lane(bench.device, kUp, kChunk);
  Bytes scratch(256);
  BlockPtr block = bench.side->store().allocate_device(256, "test");
  const StreamId down = bench.side->device().create_stream(kDown);
  const Bytes sent = pattern(64, 1);
  bench.side->fail_next_copy(kDown);
  Event failed;
  try {
    bench.side->device().copy_async(scratch.data(), block->data(), 256, down);
    failed = bench.side->device().record(down);
  } catch (const std::runtime_error&) {
    SKIP("this side reports the failure at once, there is no failed event");
  }
  CopyJob job = bench.upload("job", sent);
  job.after = failed;
  lane.submit(std::move(job));
  bench.wait_for(1);
  CHECK(bench.result("job").find("injected") != std::string::npos);
  CHECK_EQ(bench.device.copies().size(), std::size_t{0});
}

TEST_CASE("done may submit the next job") {
  Bench bench(false);
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(kChunk, 1);
  CopyJob second = bench.upload("second", sent);
  CopyJob first = bench.upload("first", sent);
  first.done = [&, report = first.done](std::exception_ptr failure) {
    report(failure);
    lane.submit(second);
  };
  lane.submit(std::move(first));
  bench.wait_for(2);
  CHECK(bench.done_order() == kNames({"first", "second"}));
}

TEST_CASE("the memory that done holds is freed when it returns") {
  Bench bench(false);
  TransferLane lane(bench.device, kUp, kChunk);
  const Bytes sent = pattern(kChunk, 1);
  CopyJob job = bench.upload("job", sent);
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  job.done = [held = std::move(held), report = job.done](std::exception_ptr failure) {
    report(failure);
  };
  lane.submit(std::move(job));
  lane.submit(bench.upload("next", sent));
  bench.wait_for(2);
  CHECK(watch.expired());
}

TEST_CASE("closing ends every job once: those in flight well, the rest with an error") {
  const Bytes sent = pattern(kChunk, 1), large = pattern(4 * kChunk, 2);
  Bytes scratch(256);
  Bench bench;
  BlockPtr& block = bench.blocks["scratch"];
  block = bench.side->store().allocate_device(256, "test");
  const StreamId down = bench.side->device().create_stream(kDown);
  bench.side->hold(kDown);
  bench.side->device().copy_async(scratch.data(), block->data(), 256, down);
  bench.side->hold(kUp);
  auto lane = std::make_unique<TransferLane>(bench.device, kUp, kChunk);
  TransferLane* const closing = lane.get();  // reset() empties the pointer first
  lane->submit(bench.upload("in flight", sent, 0));
  lane->submit(bench.upload("half", large, 1));
  bench.wait_for_copies(2);
  lane->submit(bench.upload("queued", sent, 2));
  CopyJob waiting = bench.upload("waiting", sent, 0);
  waiting.after = bench.side->device().record(down);
  waiting.done = [&, report = waiting.done](std::exception_ptr failure) {
    report(failure);
    closing->submit(bench.upload("too late", sent));
  };
  lane->submit(std::move(waiting));
  auto closed = std::async(std::launch::async, [&] { lane.reset(); });
  bench.wait_for(3);  // the two that never started, and the one submitted too late
  bench.side->release_all(kUp);
  get_soon(std::move(closed));
  CHECK_EQ(bench.result("in flight"), "good");
  for (const char* name : {"half", "queued", "waiting"}) {
    CHECK(bench.result(name).find("closed before the copy was complete") != std::string::npos);
  }
  CHECK(bench.result("too late").find("closed before") != std::string::npos);
  bench.side->release_all(kDown);
}

TEST_CASE("closing gives a copy up that never ends, and says that its memory is not safe") {
  const Bytes sent = pattern(kChunk, 1);
  Bench bench;
  bench.side->hold(kUp);
  {
    TransferLane lane(bench.device, kUp, kChunk);
    lane.submit(bench.upload("stuck", sent));
    bench.wait_for_copies(1);
  }
  CHECK(bench.result("stuck").find("may yet be written") != std::string::npos);
  bench.side->release_all(kUp);
}

TEST_CASE("a broken contract is refused at the door") {
  Bench bench(false);
  std::byte byte{};
  CHECK_THROWS(TransferLane(bench.device, kUp, 0), std::invalid_argument, "chunk_bytes is 0");
  TransferLane lane(bench.device, kUp, kChunk);
  CHECK_THROWS(lane.submit({.segments = {{nullptr, &byte, 1}}, .done = {}}), std::invalid_argument,
               "null dst");
  CHECK_THROWS(lane.submit({.segments = {{&byte, nullptr, 1}}, .done = {}}), std::invalid_argument,
               "null src");
}

TEST_CASE("the timeline gets one span for each job that moved bytes") {
  Bench bench(false);
  Timeline timeline;
  timeline.enable(true);
  const Bytes sent = pattern(3 * kChunk + 5, 1);
  {
    TransferLane lane(bench.device, kUp, kChunk, &timeline);
    CopyJob named = bench.upload("named", sent);
    named.unit = 4;
    named.what = "parameters";
    lane.submit(std::move(named));
    lane.submit(bench.upload("plain", sent, 1));
    bench.wait_for(2);
  }
  const auto spans = timeline.take();
  CHECK_EQ(spans.size(), std::size_t{2});
  CHECK_EQ(spans[0].unit, 4);
  CHECK_EQ(spans[0].what, "parameters");
  CHECK_EQ(spans[1].what, "upload");
  for (const TimelineSpan& span : spans) {
    CHECK(span.lane == Lane::kHostToDevice);
    CHECK_EQ(span.bytes, sent.size());
    CHECK(span.end_seconds >= span.start_seconds);
  }
}

TEST_CASE("in a forked child a lane copies on the caller") {
  Bench bench(false);
  if (bench.device.capabilities().is_cuda) SKIP("CUDA itself does not work after a fork");
  auto lane = std::make_unique<TransferLane>(bench.device, kUp, kChunk);
  const Bytes sent = pattern(3 * kChunk, 1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // a hang ends as a failure
    bool called = false, good = true;
    CopyJob job = bench.upload("job", sent);
    job.done = [&](std::exception_ptr failure) {
      called = true;
      good = failure == nullptr;
    };
    const std::byte* data = bench.blocks["job"]->data();
    lane->submit(std::move(job));
    lane.reset();
    _exit(called && good && std::equal(sent.begin(), sent.end(), data) ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

TEST_CASE("with random delays every job arrives whole, over 20 seeds") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Bench bench;
    bench.side->random_delays(seed, 2e-4);
    std::mt19937 random(seed);
    std::map<std::string, Bytes> sent, received;
    for (int i = 0; i < 12; ++i) {
      sent[std::to_string(i)] = pattern(random() % (4 * kChunk), seed * 100 + i);
    }
    TransferLane up(bench.device, kUp, kChunk), down(bench.device, kDown, kChunk);
    for (auto& [name, bytes] : sent) {
      received[name].resize(bytes.size());
      CopyJob job = bench.upload(name, bytes, random() % 4);
      job.done = [&, name = name](std::exception_ptr) {
        down.submit({.segments = {{received[name].data(), bench.blocks[name]->data(),
                                   received[name].size()}},
                     .priority = 3,
                     .done = bench.report(name)});
      };
      up.submit(std::move(job));
    }
    bench.wait_for(sent.size());
    CHECK(received == sent);
  }
}

}  // namespace
}  // namespace autohete::testing
