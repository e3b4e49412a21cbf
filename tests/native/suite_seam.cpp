// What every side of the seam promises (device.h, store.h).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "tests/native/side.h"

namespace autohete::testing {
namespace {

using Bytes = std::vector<std::byte>;

TEST_CASE("a copy moves exactly its bytes") {
  auto side = make_side();
  const std::size_t sizes[] = {0, 1, 255, 256, 4095, 4096, 4097, (1 << 20) + 1};
  constexpr std::size_t kMargin = 64;
  for (std::size_t bytes : sizes) {
    BlockPtr block = side->store().allocate_device(bytes + 2 * kMargin, "test");
    Bytes expected = pattern(block->bytes(), 1);
    copy_now(side->device(), block->data(), expected.data(), expected.size(), kUp);
    const Bytes sent = pattern(bytes, 2);
    copy_now(side->device(), block->data() + kMargin, sent.data(), bytes, kUp);
    std::copy(sent.begin(), sent.end(), expected.begin() + kMargin);
    CHECK(read_device(side->device(), block->data(), block->bytes()) == expected);
  }
}

TEST_CASE("a stream runs its copies in order") {
  auto side = make_side();
  BlockPtr block = side->store().allocate_device(1 << 16, "test");
  if (side->has_controls()) side->random_delays(7, 1e-4);
  std::vector<Bytes> sources;
  for (unsigned i = 0; i < 50; ++i) sources.push_back(pattern(block->bytes(), i));
  const StreamId up = side->device().create_stream(kUp);
  for (const Bytes& source : sources) {
    side->device().copy_async(block->data(), source.data(), source.size(), up);
  }
  side->device().synchronize(side->device().record(up));
  CHECK(read_device(side->device(), block->data(), block->bytes()) == sources.back());
}

TEST_CASE("streams do not wait for each other without an event") {
  auto side = make_side_with_controls();
  Device& device = side->device();
  BlockPtr target = side->store().allocate_device(256, "test");
  BlockPtr other = side->store().allocate_device(256, "test");
  const Bytes sent = pattern(256, 1);
  side->hold(kUp);
  const StreamId up = device.create_stream(kUp);
  device.copy_async(target->data(), sent.data(), 256, up);
  const Event held = device.record(up);
  read_device(device, other->data(), 256);  // ends although the other direction stands still
  CHECK(!device.query(held));
  side->release_all(kUp);
  device.synchronize(held);
  CHECK(read_device(device, target->data(), 256) == sent);
}

TEST_CASE("work after wait() starts after the event") {
  auto side = make_side_with_controls();
  Device& device = side->device();
  BlockPtr block = side->store().allocate_device(1 << 16, "test");
  const Bytes sent = pattern(block->bytes(), 3);
  Bytes received(block->bytes());
  const StreamId up = device.create_stream(kUp);
  const StreamId down = device.create_stream(kDown);
  side->hold(kUp);
  device.copy_async(block->data(), sent.data(), sent.size(), up);
  device.wait(down, device.record(up));
  device.copy_async(received.data(), block->data(), received.size(), down);
  const Event landed = device.record(down);
  read_device(device, block->data(), 1);  // the link down is free: only the event holds the copy
  CHECK(!device.query(landed));
  side->release_all(kUp);
  device.synchronize(landed);
  CHECK(received == sent);
}

TEST_CASE("the compute stream waits for an event") {
  auto side = make_side_with_controls();
  Device& device = side->device();
  BlockPtr block = side->store().allocate_device(4096, "test");
  const Bytes sent = pattern(block->bytes(), 3);
  const StreamId up = device.create_stream(kUp);
  side->hold(kUp);
  device.copy_async(block->data(), sent.data(), sent.size(), up);
  const Event uploaded = device.record(up);
  auto waited = std::async(std::launch::async, [&] {
    device.wait(kComputeStream, uploaded);
    const Event after = device.record(kComputeStream);
    device.synchronize(after);
    CHECK(device.query(uploaded));
  });
  CHECK(!device.query(uploaded));
  side->release_all(kUp);
  get_soon(std::move(waited));
}

TEST_CASE("query says whether the work is done and synchronize waits for it") {
  auto side = make_side_with_controls();
  Device& device = side->device();
  BlockPtr block = side->store().allocate_device(256, "test");
  const Bytes sent = pattern(256, 1);
  const StreamId up = device.create_stream(kUp);
  side->hold(kUp);
  std::vector<Event> events;
  for (int i = 0; i < 3; ++i) {
    device.copy_async(block->data(), sent.data(), 256, up);
    events.push_back(device.record(up));
  }
  for (int i = 0; i < 3; ++i) {
    for (int later = i; later < 3; ++later) CHECK(!device.query(events[later]));
    side->release(kUp, 1);
    get_soon(std::async(std::launch::async, [&] { device.synchronize(events[i]); }));
    CHECK(device.query(events[i]));
  }
}

TEST_CASE("an event without work is complete") {
  auto side = make_side();
  Device& device = side->device();
  const Event none;
  CHECK(device.query(none));
  device.synchronize(none);
  device.wait(kComputeStream, none);
  device.wait(device.create_stream(kUp), none);
  bool called = false;
  device.when_complete(none, [&] { called = true; });
  CHECK(called);
}

TEST_CASE("events of one stream complete in the order of their recording") {
  auto side = make_side_with_controls();
  Device& device = side->device();
  BlockPtr block = side->store().allocate_device(512, "test");
  const Bytes sent = pattern(256, 1);
  const StreamId first_stream = device.create_stream(kUp);
  const StreamId second_stream = device.create_stream(kUp);
  side->hold(kUp);
  device.copy_async(block->data(), sent.data(), 256, first_stream);
  const Event first = device.record(first_stream);
  const Event second = device.record(first_stream);
  device.copy_async(block->data() + 256, sent.data(), 256, second_stream);
  const Event elsewhere = device.record(second_stream);
  CHECK(first.completes_by(first));
  CHECK(first.completes_by(second));
  CHECK(!second.completes_by(first));
  CHECK(!first.completes_by(elsewhere));
  CHECK(Event().completes_by(first));
  CHECK(!first.completes_by(Event()));
  side->release_all(kUp);
  device.synchronize(second);
  device.synchronize(elsewhere);
}

TEST_CASE("a callback runs once, after the work queued before it") {
  auto side = make_side_with_controls();
  Device& device = side->device();
  BlockPtr block = side->store().allocate_device(256, "test");
  const Bytes sent = pattern(256, 1);
  const StreamId up = device.create_stream(kUp);
  std::atomic<int> calls{0};
  side->hold(kUp);
  device.copy_async(block->data(), sent.data(), 256, up);
  const Event copied = device.record(up);
  device.host_callback(up, [&] { ++calls; });
  const Event called = device.record(up);
  CHECK(!device.query(copied));
  CHECK_EQ(calls.load(), 0);
  side->release_all(kUp);
  device.synchronize(called);
  CHECK_EQ(calls.load(), 1);
}

TEST_CASE("a callback on the compute stream runs") {
  auto side = make_side();
  auto called = std::make_shared<std::promise<std::thread::id>>();
  side->device().host_callback(kComputeStream,
                               [called] { called->set_value(std::this_thread::get_id()); });
  get_soon(called->get_future());
}

TEST_CASE("when_complete calls once per event, and no event holds up another") {
  auto side = make_side_with_controls();
  Device& device = side->device();
  BlockPtr block = side->store().allocate_device(512, "test");
  const Bytes sent = pattern(256, 1);
  Bytes received(256);
  const StreamId up = device.create_stream(kUp);
  const StreamId down = device.create_stream(kDown);
  side->hold(kUp);
  side->hold(kDown);
  device.copy_async(block->data(), sent.data(), 256, up);
  const Event late = device.record(up);
  device.copy_async(received.data(), block->data() + 256, 256, down);
  const Event early = device.record(down);
  std::atomic<int> late_calls{0}, early_calls{0};
  std::promise<void> late_called, early_called;
  device.when_complete(late, [&] {
    ++late_calls;
    late_called.set_value();
  });
  device.when_complete(early, [&] {
    ++early_calls;
    early_called.set_value();
  });
  side->release_all(kDown);
  get_soon(early_called.get_future());
  CHECK_EQ(late_calls.load(), 0);
  side->release_all(kUp);
  get_soon(late_called.get_future());
  CHECK_EQ(late_calls.load(), 1);
  CHECK_EQ(early_calls.load(), 1);
  bool at_once = false;
  device.when_complete(late, [&] { at_once = true; });
  CHECK(at_once);
}

TEST_CASE("when_complete does not hold up the stream") {
  auto side = make_side_with_controls();
  Device& device = side->device();
  BlockPtr block = side->store().allocate_device(256, "test");
  const Bytes sent = pattern(256, 1);
  const StreamId up = device.create_stream(kUp);
  side->hold(kUp);
  for (int i = 0; i < 20; ++i) {  // each with a wait of its own pending
    device.copy_async(block->data(), sent.data(), 256, up);
    device.when_complete(device.record(up), [] {});
  }
  const Event last = device.record(up);
  CHECK(!device.query(last));
  side->release_all(kUp);
  get_soon(std::async(std::launch::async, [&] { device.synchronize(last); }));
}

TEST_CASE("a failed copy is reported and the device goes on") {
  auto side = make_side_with_controls();
  Device& device = side->device();
  BlockPtr block = side->store().allocate_device(256, "test");
  const Bytes sent = pattern(256, 1);
  const StreamId up = device.create_stream(kUp);
  side->fail_next_copy(kUp);
  const auto copy_and_wait = [&] {
    device.copy_async(block->data(), sent.data(), 256, up);
    device.synchronize(device.record(up));
  };
  CHECK_THROWS(copy_and_wait(), std::runtime_error, "fail");
  copy_and_wait();
  CHECK(read_device(device, block->data(), 256) == sent);
}

TEST_CASE("events may outlive their device") {
  Event event;
  {
    auto side = make_side();
    event = side->device().record(side->device().create_stream(kUp));
    side->device().synchronize(event);
  }
  event = Event();
}

TEST_CASE("streams and events may be used from many threads") {
  auto side = make_side();
  Device& device = side->device();
  constexpr unsigned kThreads = 8;
  constexpr std::size_t kBytes = 1 << 14;
  std::vector<BlockPtr> blocks;
  for (unsigned i = 0; i < kThreads; ++i) {
    blocks.push_back(side->store().allocate_device(kBytes, "test"));
  }
  std::vector<std::future<bool>> results;
  for (unsigned i = 0; i < kThreads; ++i) {
    results.push_back(std::async(std::launch::async, [&, i] {
      const StreamId up = device.create_stream(kUp);
      const StreamId down = device.create_stream(kDown);
      bool equal = true;
      for (unsigned round = 0; round < 20; ++round) {
        const Bytes sent = pattern(kBytes, i * 100 + round);
        Bytes received(kBytes);
        device.copy_async(blocks[i]->data(), sent.data(), kBytes, up);
        device.wait(down, device.record(up));
        device.copy_async(received.data(), blocks[i]->data(), kBytes, down);
        device.synchronize(device.record(down));
        equal = equal && received == sent;
      }
      return equal;
    }));
  }
  for (auto& result : results) CHECK(get_soon(std::move(result)));
}

TEST_CASE("a stream that was never made is refused") {
  auto side = make_side();
  const StreamId none = side->device().create_stream(kUp) + 1;
  std::byte byte{};
  CHECK_THROWS(side->device().copy_async(&byte, &byte, 1, none), std::invalid_argument,
               "create_stream");
  CHECK_THROWS(side->device().record(none), std::invalid_argument, "create_stream");
}

TEST_CASE("an event of another kind of device is refused") {
  auto side = make_side();
  struct Foreign final : Event::State {};
  const Event foreign(std::make_shared<Foreign>());
  CHECK_THROWS(side->device().query(foreign), std::invalid_argument, "another kind");
  CHECK_THROWS(side->device().wait(kComputeStream, foreign), std::invalid_argument, "another kind");
}

TEST_CASE("device blocks count exactly and give their bytes back") {
  auto side = make_side();
  const std::size_t before = side->device_budget().used();
  {
    BlockPtr block = side->store().allocate_device(1000, "test");
    CHECK_EQ(block->bytes(), std::size_t{1000});
    CHECK(block->tier() == Tier::kDevice);
    CHECK_EQ(side->device_budget().used(), before + 1000);
    BlockPtr again = block;
    block.reset();
    CHECK_EQ(side->device_budget().used(), before + 1000);
  }
  CHECK_EQ(side->device_budget().used(), before);
  CHECK_EQ(side->device_budget().peak(), before + 1000);
}

TEST_CASE("host blocks are zero, aligned, and take at most a page more than asked") {
  auto side = make_side();
  for (std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{5} << 20}) {
    BlockPtr block = side->store().allocate_host(bytes, "test");
    CHECK_EQ(block->bytes(), bytes);
    CHECK(block->tier() == Tier::kHost);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(block->data()) % kBlockAlignment, 0u);
    CHECK(std::all_of(block->data(), block->data() + bytes,
                      [](std::byte value) { return value == std::byte{0}; }));
    CHECK(side->host_budget().used() < bytes + 65536);
    CHECK(side->host_budget().used() >= bytes);
  }
  CHECK_EQ(side->host_budget().used(), std::size_t{0});
}

TEST_CASE("a full tier says what asked, for how much, and what was left") {
  auto side = make_side({.device_bytes = 10000, .host_bytes = 1 << 16});
  BlockPtr some = side->store().allocate_device(4000, "slot 0");
  CHECK_THROWS(side->store().allocate_device(6001, "parameters of unit h.3"), OutOfMemory,
               "parameters of unit h.3 needs 6001 bytes, but 6000 are left of 10000");
  CHECK_EQ(side->device_budget().used(), std::size_t{4000});
  try {
    side->store().allocate_host(1 << 20, "optimizer state of unit h.1");
    check::fail(__FILE__, __LINE__, "the host tier gave more than its budget");
  } catch (const OutOfMemory& error) {
    CHECK(std::string(error.what()).find("optimizer state of unit h.1 needs 1048576") !=
          std::string::npos);
    CHECK_EQ(error.asked_bytes(), std::size_t{1 << 20});
    CHECK_EQ(error.free_bytes(), std::size_t{1 << 16});
  }
  CHECK_EQ(side->host_budget().used(), std::size_t{0});
  some.reset();
  BlockPtr all = side->store().allocate_device(10000, "slot 1");
}

TEST_CASE("refused pinning warns once and goes on with pageable memory") {
  auto side = make_side_with_controls();
  side->refuse_pinning(1 << 20);
  BlockPtr pinned = side->store().allocate_host(1 << 20, "unit h.0");
  CHECK(side->store().pins_host_memory());
  CHECK_EQ(side->warnings().size(), std::size_t{0});
  BlockPtr first = side->store().allocate_host(1 << 20, "unit h.1");
  BlockPtr second = side->store().allocate_host(1 << 20, "unit h.2");
  CHECK(!side->store().pins_host_memory());
  CHECK_EQ(side->warnings().size(), std::size_t{1});
  const std::string& warning = side->warnings()[0];
  CHECK(warning.find("pinned host memory: 1048576 bytes for unit h.1") != std::string::npos);
  CHECK(warning.find("1048576 bytes pinned so far") != std::string::npos);
  BlockPtr block = side->store().allocate_device(1 << 20, "test");
  const Bytes sent = pattern(1 << 20, 5);
  std::memcpy(second->data(), sent.data(), sent.size());
  copy_now(side->device(), block->data(), second->data(), sent.size(), kUp);
  CHECK(read_device(side->device(), block->data(), sent.size()) == sent);
}

TEST_CASE("pin=False pins nothing and does not warn") {
  auto side = make_side({.pin = false});
  BlockPtr block = side->store().allocate_host(1 << 20, "test");
  CHECK(!side->store().pins_host_memory());
  CHECK_EQ(side->warnings().size(), std::size_t{0});
}

TEST_CASE("capabilities name the device and its memory") {
  auto side = make_side({.device_bytes = 12345678});
  const DeviceCapabilities capabilities = side->device().capabilities();
  CHECK(!capabilities.name.empty());
  CHECK_EQ(capabilities.is_cuda, capabilities.name != "host");
  if (!capabilities.is_cuda) CHECK_EQ(capabilities.total_bytes, std::size_t{12345678});
  CHECK(capabilities.total_bytes > 0);
}

}  // namespace
}  // namespace autohete::testing
