// Lanes and the host device under load, for the thread and address sanitizers: several threads
// submit jobs of all sizes with events of all kinds while links fail, stand still and change speed,
// blocks come and go, and lanes and devices are closed with work left. Every job must be done once,
// and every job without an error must have moved its bytes.
#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "csrc/device/host_device.h"
#include "csrc/device/host_store.h"
#include "csrc/runtime/timeline.h"
#include "csrc/runtime/transfer.h"
#include "tests/native/side.h"

namespace autohete::testing {
namespace {

constexpr std::size_t kChunk = 1 << 12;
constexpr int kSubmitters = 4;
constexpr int kJobsEach = 60;

// One trip of some bytes: up into a device block, then down into other host memory.
struct Trip {
  std::vector<std::byte> sent, received;
  BlockPtr block;
  std::atomic<int> up_done{0}, down_done{0};
  std::atomic<bool> failed{false};
};

struct World {
  explicit World(unsigned seed) {
    device->link(kUp).set_random_delays(seed, 1e-4);
    device->link(kDown).set_random_delays(seed + 1, 1e-4);
    up = std::make_unique<TransferLane>(*device, kUp, kChunk, &timeline);
    down = std::make_unique<TransferLane>(*device, kDown, kChunk, &timeline);
  }
  std::shared_ptr<Budget> device_budget = std::make_shared<Budget>(64 << 20);
  std::shared_ptr<Budget> host_budget = std::make_shared<Budget>(64 << 20);
  HostStore store{{device_budget, host_budget, true, {}}};
  Timeline timeline;
  std::unique_ptr<HostDevice> device = std::make_unique<HostDevice>(device_budget);
  std::unique_ptr<TransferLane> up, down;
};

// Submits the way down when the way up is done, as the engine does.
void submit_trip(World& world, Trip& trip, std::uint64_t priority, Event after) {
  CopyJob job;
  const std::size_t half = trip.sent.size() / 2;
  job.segments = {{trip.block->data(), trip.sent.data(), half},
                  {trip.block->data() + half, trip.sent.data() + half, trip.sent.size() - half}};
  job.priority = priority;
  job.after = std::move(after);
  job.done = [&world, &trip, priority](std::exception_ptr failure) {
    ++trip.up_done;
    if (failure) trip.failed = true;
    CopyJob back;
    back.segments = {{trip.received.data(), trip.block->data(), trip.sent.size()}};
    back.priority = priority;
    back.done = [&trip](std::exception_ptr failure) {
      if (failure) trip.failed = true;
      trip.block.reset();
      ++trip.down_done;
    };
    world.down->submit(std::move(back));
  };
  world.up->submit(std::move(job));
}

// Submits its trips, each behind nothing, a fresh event, or an event of another stream.
void submit_all(World& world, std::vector<std::unique_ptr<Trip>>& trips, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> scratch(64), more(64);
  const StreamId side_stream = world.device->create_stream(random() % 2 ? kUp : kDown);
  for (auto& trip : trips) {
    const std::size_t bytes = random() % (4 * kChunk);
    trip = std::make_unique<Trip>();
    trip->sent = pattern(bytes, random());
    trip->received.resize(bytes);
    trip->block = world.store.allocate_device(bytes, "trip");
    Event after;
    if (random() % 2) {
      world.device->copy_async(scratch.data(), more.data(), 64, side_stream);
      after = world.device->record(side_stream);
    }
    submit_trip(world, *trip, random() % 8, std::move(after));
  }
  const Event end = world.device->record(side_stream);
  try {
    world.device->synchronize(end);      // the scratch memory is this thread's
  } catch (const std::runtime_error&) {  // a failure injected into the link
  }
}

void disturb(World& world, unsigned seed, const std::atomic<bool>& stop) {
  std::mt19937 random(seed);
  while (!stop) {
    HostLink& link = world.device->link(random() % 2 ? kUp : kDown);
    switch (random() % 5) {
      case 0:
        link.fail_next(1);
        break;
      case 1:
        link.hold();
        break;
      case 2:
        link.release(random() % 3);
        break;
      case 3:
        link.set_speed({.bytes_per_second = 1e9, .duplex_factor = 0.5});
        break;
      case 4:
        (void)world.timeline.take();
        break;
    }
    world.timeline.enable(random() % 2);
    link.release_all();
    std::this_thread::yield();
  }
}

void run_round(unsigned seed, bool close_early) {
  std::vector<std::vector<std::unique_ptr<Trip>>> trips(kSubmitters);
  std::size_t good = 0;
  {
    World world(seed);
    std::atomic<bool> stop{false};
    std::thread disturber([&] { disturb(world, seed, stop); });
    std::vector<std::thread> submitters;
    for (int i = 0; i < kSubmitters; ++i) {
      trips[i].resize(kJobsEach);
      submitters.emplace_back([&, i] { submit_all(world, trips[i], seed * 10 + i); });
    }
    for (std::thread& submitter : submitters) submitter.join();
    if (!close_early) {
      for (auto& list : trips) {
        for (auto& trip : list) {
          while (trip->down_done == 0) std::this_thread::yield();
        }
      }
    }
    stop = true;
    disturber.join();
    world.up.reset();  // the jobs left end with an error; their way down is submitted all the same
    world.down.reset();
    for (auto& list : trips) {
      for (auto& trip : list) {
        CHECK_EQ(trip->up_done.load(), 1);
        CHECK_EQ(trip->down_done.load(), 1);
        if (trip->failed) continue;
        CHECK(trip->received == trip->sent);
        ++good;
      }
    }
    CHECK_EQ(world.device_budget->used(), std::size_t{0});
  }
  if (!close_early) CHECK(good > 0);
}

TEST_CASE("under load, failures and holds every job is done once and whole") {
  for (unsigned seed = 0; seed < 15; ++seed) run_round(seed, false);
}

TEST_CASE("lanes closed with work left end every job once") {
  for (unsigned seed = 100; seed < 115; ++seed) run_round(seed, true);
}

TEST_CASE("a device closed with everything queued ends every event") {
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::vector<std::byte> a(64), b(64);  // 16 bytes for each stream
    std::atomic<int> called{0};
    int expected = 0;
    {
      HostDevice device(std::make_shared<Budget>(1 << 20));
      std::vector<StreamId> streams;
      std::vector<Event> events(1);
      for (int i = 0; i < 4; ++i) streams.push_back(device.create_stream(i % 2 ? kUp : kDown));
      device.link(kUp).hold();
      std::mt19937 random(seed);
      for (int i = 0; i < 100; ++i) {
        const std::size_t which = random() % 4;
        const StreamId stream = streams[which];
        device.wait(stream, events[random() % events.size()]);
        device.copy_async(&a[16 * which], &b[16 * which], 16, stream);
        events.push_back(device.record(stream));
        device.when_complete(events.back(), [&] { ++called; });
        ++expected;
      }
    }
    CHECK_EQ(called.load(), expected);
  }
}

}  // namespace
}  // namespace autohete::testing

int main(int argc, char** argv) { return check::main_of_tests(argc, argv); }
