// What only the host device promises: the link's speed, the test controls, fork, its memory.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "csrc/device/host_device.h"
#include "csrc/device/host_store.h"
#include "csrc/device/mapped_memory.h"
#include "tests/native/side.h"

namespace autohete::testing {
namespace {

using Clock = std::chrono::steady_clock;

HostStore make_store(std::size_t device_bytes) {
  return HostStore(
      {std::make_shared<Budget>(device_bytes), std::make_shared<Budget>(1 << 24), true, {}});
}

// Seconds that `num_copies` of `bytes` take on one stream. Used for "no earlier than" only.
double seconds_for(HostDevice& device, std::size_t bytes, int num_copies) {
  std::vector<std::byte> a(bytes), b(bytes);
  const StreamId up = device.create_stream(kUp);
  const auto start = Clock::now();
  for (int i = 0; i < num_copies; ++i) device.copy_async(a.data(), b.data(), bytes, up);
  device.synchronize(device.record(up));
  return std::chrono::duration<double>(Clock::now() - start).count();
}

TEST_CASE("a throttled copy ends no earlier than latency plus bytes over speed") {
  HostDevice device(std::make_shared<Budget>(1 << 20));
  device.link(kUp).set_speed({.bytes_per_second = 1e7, .latency_seconds = 0.002});
  CHECK(seconds_for(device, 100000, 1) >= 0.012);
  CHECK(seconds_for(device, 100000, 3) >= 0.036);
}

TEST_CASE("two streams of one direction share the link") {
  HostDevice device(std::make_shared<Budget>(1 << 20));
  device.link(kUp).set_speed({.bytes_per_second = 1e7});
  const auto start = Clock::now();
  auto other = std::async(std::launch::async, [&] { return seconds_for(device, 100000, 2); });
  seconds_for(device, 100000, 2);
  other.get();
  CHECK(std::chrono::duration<double>(Clock::now() - start).count() >= 0.04);
}

TEST_CASE("directions that disturb each other are slower together") {
  HostDevice device(std::make_shared<Budget>(1 << 20));
  device.link(kUp).set_speed({.bytes_per_second = 1e7, .duplex_factor = 0.5});
  std::vector<std::byte> a(256), b(256);
  const StreamId down = device.create_stream(kDown);
  device.link(kDown).set_speed({.latency_seconds = 60});  // busy until the device closes
  device.copy_async(a.data(), b.data(), 256, down);
  while (device.link(kDown).num_started() == 0) std::this_thread::yield();
  CHECK(seconds_for(device, 100000, 1) >= 0.02);
}

TEST_CASE("a copy starts when it was queued or the one before ended, however late it is made") {
  HostLink link, other;
  link.set_speed({.latency_seconds = 60});
  std::vector<std::byte> a(256), b(256);
  const auto long_ago = Clock::now() - std::chrono::seconds(150);
  link.copy(a.data(), b.data(), 256, long_ago, other);  // ended 90 s ago
  link.copy(a.data(), b.data(), 256, long_ago, other);  // and 30 s ago: nothing to wait for
  CHECK_EQ(link.num_ended(), std::size_t{2});
}

TEST_CASE("copies that were held back take their whole time afterwards") {
  HostDevice device(std::make_shared<Budget>(1 << 20));
  HostLink& link = device.link(kUp);
  std::vector<std::byte> a(256), b(256);
  const StreamId up = device.create_stream(kUp);
  link.hold();
  link.set_speed({.latency_seconds = 0.01});
  const auto queued = Clock::now();
  for (int i = 0; i < 3; ++i) device.copy_async(a.data(), b.data(), 256, up);
  const Event end = device.record(up);
  while (Clock::now() < queued + std::chrono::milliseconds(40)) std::this_thread::yield();
  const auto start = Clock::now();
  link.release_all();
  device.synchronize(end);
  CHECK(std::chrono::duration<double>(Clock::now() - start).count() >= 0.03);
}

TEST_CASE("a link setting out of range is refused") {
  HostLink link;
  CHECK_THROWS(link.set_speed({.bytes_per_second = -1}), std::invalid_argument, "-1");
  CHECK_THROWS(link.set_speed({.duplex_factor = 0}), std::invalid_argument, "duplex_factor");
  CHECK_THROWS(link.set_speed({.duplex_factor = 1.5}), std::invalid_argument, "duplex_factor");
  CHECK_THROWS(link.set_speed({.latency_seconds = std::nan("")}), std::invalid_argument, "nan");
  CHECK_THROWS(link.set_random_delays(0, -1), std::invalid_argument, "max_seconds");
}

TEST_CASE("held copies go one by one as they are released") {
  HostDevice device(std::make_shared<Budget>(1 << 20));
  HostLink& link = device.link(kUp);
  std::vector<std::byte> a(256), b(256);
  const StreamId up = device.create_stream(kUp);
  link.hold();
  std::vector<Event> events;
  for (int i = 0; i < 4; ++i) {
    device.copy_async(a.data(), b.data(), 256, up);
    events.push_back(device.record(up));
  }
  CHECK_EQ(link.num_started(), std::size_t{0});
  link.release(2);
  device.synchronize(events[1]);
  CHECK_EQ(link.num_ended(), std::size_t{2});
  CHECK(!device.query(events[2]));
  link.hold();  // permits of an earlier hold do not add up
  link.release(1);
  device.synchronize(events[2]);
  CHECK(!device.query(events[3]));
  link.release_all();
  device.synchronize(events[3]);
}

TEST_CASE("over a free link a copy is made by who asks for it, and in its turn behind others") {
  HostDevice device(std::make_shared<Budget>(1 << 20));
  HostLink& link = device.link(kUp);
  const std::vector<std::byte> first = pattern(256, 1), second = pattern(256, 2);
  std::vector<std::byte> received(256);
  const StreamId up = device.create_stream(kUp);
  device.copy_async(received.data(), first.data(), 256, up);
  CHECK(received == first);
  CHECK(device.query(device.record(up)));
  link.hold();
  device.copy_async(received.data(), second.data(), 256, up);
  const Event held = device.record(up);
  CHECK(!device.query(held));
  CHECK(received == first);
  std::promise<void> begun, go;
  device.host_callback(up, [&] { begun.set_value(), go.get_future().wait(); });
  link.release_all();
  device.synchronize(held);
  get_soon(begun.get_future());
  // The link is free again and the stream is not: the copy must not pass the callback.
  device.copy_async(received.data(), first.data(), 256, up);
  const Event behind = device.record(up);
  CHECK(received == second);
  CHECK(!device.query(behind));
  go.set_value();
  device.synchronize(behind);
  CHECK(received == first);
}

TEST_CASE("many threads ask one idle stream for copies, and each has its own before its event") {
  constexpr int kThreads = 4, kCopies = 2000;
  HostDevice device(std::make_shared<Budget>(1 << 20));
  const StreamId up = device.create_stream(kUp);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::byte> received(64);
      for (int i = 0; i < kCopies; ++i) {
        const std::vector<std::byte> sent = pattern(64, t * kCopies + i);
        device.copy_async(received.data(), sent.data(), 64, up);
        device.synchronize(device.record(up));
        if (received != sent) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(device.link(kUp).num_ended(), std::size_t{kThreads * kCopies});
}

TEST_CASE("a device destroyed with held copies fails them and does not hang") {
  std::vector<std::byte> a(256), b(256);
  std::promise<void> called;
  Event held, dependent;
  {
    HostDevice device(std::make_shared<Budget>(1 << 20));
    const StreamId up = device.create_stream(kUp);
    const StreamId down = device.create_stream(kDown);
    device.link(kUp).hold();
    device.copy_async(a.data(), b.data(), 256, up);
    held = device.record(up);
    device.wait(down, held);
    dependent = device.record(down);
    device.when_complete(held, [&] { called.set_value(); });
  }
  get_soon(called.get_future());
  HostDevice other(std::make_shared<Budget>(1 << 20));
  CHECK_THROWS(other.synchronize(held), std::runtime_error, "closing");
  CHECK_THROWS(other.synchronize(dependent), std::runtime_error, "closing");
}

TEST_CASE("a failure reaches the next event and whoever waits for it, and no other") {
  HostDevice device(std::make_shared<Budget>(1 << 20));
  std::vector<std::byte> a(256), b(256);
  const StreamId up = device.create_stream(kUp);
  const StreamId down = device.create_stream(kDown);
  device.link(kUp).fail_next(1);
  device.copy_async(a.data(), b.data(), 256, up);
  const Event failed = device.record(up);
  const Event later = device.record(up);
  device.wait(down, failed);
  const Event dependent = device.record(down);
  CHECK_THROWS(device.synchronize(failed), std::runtime_error, "injected");
  CHECK_THROWS(device.query(failed), std::runtime_error, "injected");
  CHECK_THROWS(device.wait(kComputeStream, failed), std::runtime_error, "injected");
  device.synchronize(later);
  CHECK_THROWS(device.synchronize(dependent), std::runtime_error, "injected");
}

TEST_CASE("the compute stream is the caller: done at once") {
  HostDevice device(std::make_shared<Budget>(1 << 20));
  const std::vector<std::byte> sent = pattern(100, 1);
  std::vector<std::byte> received(100);
  device.copy_async(received.data(), sent.data(), 100, kComputeStream);
  CHECK(received == sent);
  CHECK(device.query(device.record(kComputeStream)));
  const auto caller = std::this_thread::get_id();
  std::thread::id where;
  device.host_callback(kComputeStream, [&] { where = std::this_thread::get_id(); });
  CHECK(where == caller);
}

TEST_CASE("a forked child works on its own thread and leaves the parent's alone") {
  auto device = std::make_unique<HostDevice>(std::make_shared<Budget>(1 << 20));
  std::vector<std::byte> a(256), b = pattern(256, 1);
  const StreamId up = device->create_stream(kUp);
  device->link(kUp).hold();
  device->copy_async(a.data(), b.data(), 256, up);
  Event pending = device->record(up);
  auto waiter = std::async(std::launch::async, [&] { device->synchronize(pending); });
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // a hang ends as a failure
    std::vector<std::byte> received(256);
    device->copy_async(received.data(), b.data(), 256, up);
    bool good = received == b && device->query(device->record(up));
    try {
      device->synchronize(pending);
      good = false;
    } catch (const std::runtime_error& error) {
      good = good && std::strstr(error.what(), "forked");
    }
    pending = Event();
    device.reset();
    _exit(good ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  device->link(kUp).release_all();
  get_soon(std::move(waiter));
  CHECK(a == b);
}

TEST_CASE("poisoned memory reads as NaN") {
  HostStore store = make_store(1 << 20);
  BlockPtr clean = store.allocate_device(4096, "test");
  store.set_poison(true);
  BlockPtr block = store.allocate_device(4096, "test");
  HostStore::poison(*clean);
  for (const BlockPtr& each : {clean, block}) {
    std::vector<float> values(1024);
    std::memcpy(values.data(), each->data(), 4096);
    for (float value : values) CHECK(std::isnan(value));
  }
}

TEST_CASE("an injected allocation failure hits the next allocation of its tier only") {
  HostStore store = make_store(1 << 20);
  store.fail_next_allocations(Tier::kHost, 1);
  BlockPtr device_block = store.allocate_device(100, "test");
  CHECK_THROWS(store.allocate_host(100, "unit h.1"), OutOfMemory, "unit h.1 needs 100 bytes");
  BlockPtr host_block = store.allocate_host(100, "test");
}

TEST_CASE("mapped memory takes whole pages and no more") {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  CHECK_EQ(MappedMemory(0).mapped_bytes(), page);
  CHECK_EQ(MappedMemory(1).mapped_bytes(), page);
  CHECK_EQ(MappedMemory(page + 1).mapped_bytes(), 2 * page);
  const std::size_t big = (std::size_t{5} << 20) + 1;
  MappedMemory memory(big);
  CHECK_EQ(memory.mapped_bytes(), (std::size_t{5} << 20) + page);
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % (std::size_t{2} << 20), 0u);
  std::memset(memory.data(), 1, memory.mapped_bytes());  // all of it is ours
  CHECK_THROWS(MappedMemory(SIZE_MAX - 100), std::bad_alloc, "");
}

TEST_CASE("a budget never goes over its limit, whoever charges") {
  Budget budget(1000);
  std::atomic<int> taken{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 1000; ++k) taken += budget.charge(7);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(taken.load(), 142);
  CHECK_EQ(budget.used(), std::size_t{994});
  CHECK_EQ(budget.peak(), std::size_t{994});
  budget.set_limit(500);  // below what is used: nothing is free, and nothing wraps around
  CHECK_EQ(budget.free(), std::size_t{0});
  CHECK(!budget.charge(1));
}

// The words the kernel keeps about the mapping that holds `address`.
std::string mapping_flags(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin, end;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      inside = begin <= wanted && wanted < end;
    } else if (inside && line.rfind("VmFlags:", 0) == 0) {
      return line + " ";
    }
  }
  return {};
}

TEST_CASE("host blocks from 2 MiB on ask for huge pages, smaller ones do not") {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) SKIP("no such pages here");
  HostStore store = make_store(1 << 24);
  const BlockPtr large = store.allocate_host(4 << 20, "a pool");
  const BlockPtr small = store.allocate_host(4096, "a small block");
  CHECK(mapping_flags(large->data()).find(" hg ") != std::string::npos);
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(large->data()) % (2 << 20), std::uintptr_t{0});
  CHECK(mapping_flags(small->data()).find(" hg ") == std::string::npos);
}

// The share of a block's pages that the system has given.
double share_present(const Block& block) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> there((block.bytes() + page - 1) / page);
  CHECK_EQ(mincore(block.data(), block.bytes(), there.data()), 0);
  const auto count = std::count_if(there.begin(), there.end(), [](auto byte) { return byte & 1; });
  return static_cast<double>(count) / static_cast<double>(there.size());
}

TEST_CASE("device memory has its pages at once, host memory where that is asked for") {
  HostStore store = make_store(1 << 26);
  for (const std::size_t bytes : {std::size_t{100}, std::size_t{1} << 20, std::size_t{5} << 20}) {
    CHECK_EQ(share_present(*store.allocate_device(bytes, "a slot")), 1.0);
    const BlockPtr now = store.allocate_host(bytes, "gradients", Pages::kNow);
    CHECK_EQ(share_present(*now), 1.0);
    CHECK(std::all_of(now->data(), now->data() + bytes, [](auto b) { return b == std::byte{0}; }));
    const BlockPtr later = store.allocate_host(bytes, "a second copy", Pages::kWhenTouched);
    CHECK_EQ(share_present(*later), 0.0);
  }
}

TEST_CASE("memory that is made present keeps its bytes") {
  MappedMemory memory(std::size_t{3} << 20);
  const auto last = memory.mapped_bytes() - 1;
  memory.data()[0] = memory.data()[last] = std::byte{7};
  memory.make_present();
  CHECK(memory.data()[0] == std::byte{7} && memory.data()[last] == std::byte{7});
}

}  // namespace
}  // namespace autohete::testing
