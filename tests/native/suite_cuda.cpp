// What only the CUDA side promises: every failing call is an error with CUDA's words, nothing is
// left behind, the caller's device and last error stay as they were. Runs on the stand-in.
#include <atomic>
#include <thread>

#include "csrc/device/cuda_device.h"
#include "csrc/runtime/transfer.h"
#include "tests/native/cudart_standin.h"
#include "tests/native/side.h"

namespace autohete::testing {
namespace {

// Uses every part of the device and the store once.
void use_everything() {
  const std::vector<std::byte> sent = pattern(4096, 1);
  BlockPtr block;  // these outlive the side, and so the copies of a use cut short by an error
  auto side = make_side();
  Device& device = side->device();
  CHECK(device.capabilities().is_cuda);
  block = side->store().allocate_device(4096, "test");
  BlockPtr host = side->store().allocate_host(4096, "test");
  const StreamId up = device.create_stream(kUp);
  const StreamId down = device.create_stream(kDown);
  side->hold(kUp);
  device.copy_async(block->data(), sent.data(), 4096, up);
  const Event copied = device.record(up);
  device.wait(down, copied);
  auto called = std::make_shared<std::atomic<int>>(0);
  device.when_complete(copied, [called] { ++*called; });
  device.host_callback(down, [called] { ++*called; });
  side->release_all(kUp);
  device.synchronize(device.record(down));
  CHECK(device.query(copied));
}

TEST_CASE("each runtime call that fails is reported in CUDA's words") {
  cudart_standin::reset();
  std::size_t met = 0;
  for (const std::string& function : cudart_standin::function_names()) {
    // Elsewhere: device_count means "no GPU", and the ends of things have no one to tell.
    if (function == "cudaGetDeviceCount" || function == "cudaMemGetInfo" ||
        function == "cudaHostRegister" || function.find("Destroy") != std::string::npos ||
        function == "cudaHostUnregister") {
      continue;
    }
    cudart_standin::fail_next(function, cudaErrorIllegalAddress);
    CHECK_THROWS(use_everything(), std::runtime_error,
                 function + " failed: an illegal memory access was encountered");
    CHECK(cudart_standin::failure_was_met());
    CHECK_EQ(static_cast<int>(cudaGetLastError()), static_cast<int>(cudaSuccess));
    cudart_standin::reset();
    CHECK_EQ(cudart_standin::num_streams(), std::size_t{0});
    CHECK_EQ(cudart_standin::num_events(), std::size_t{0});
    CHECK_EQ(cudart_standin::registered_bytes(), std::size_t{0});
    ++met;
  }
  CHECK_EQ(met, std::size_t{12});
  use_everything();
}

TEST_CASE("asking for a pending event leaves no last error") {
  auto side = make_side();
  Device& device = side->device();
  const std::vector<std::byte> sent = pattern(256, 1);
  BlockPtr block = side->store().allocate_device(256, "test");
  const StreamId up = device.create_stream(kUp);
  side->hold(kUp);
  device.copy_async(block->data(), sent.data(), 256, up);
  const Event pending = device.record(up);
  CHECK(!device.query(pending));
  CHECK_EQ(static_cast<int>(cudaGetLastError()), static_cast<int>(cudaSuccess));
  side->release_all(kUp);
  device.synchronize(pending);
}

TEST_CASE("a call that is short of memory is out of memory") {
  cudart_standin::reset();
  for (const char* function : {"cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"}) {
    cudart_standin::fail_next(function, cudaErrorMemoryAllocation);
    CHECK_THROWS(use_everything(), OutOfMemory, "out of memory");
  }
}

TEST_CASE("failures at the end of things throw nothing and leave no last error") {
  cudart_standin::reset();
  for (const char* function : {"cudaStreamDestroy", "cudaEventDestroy", "cudaHostUnregister"}) {
    cudart_standin::fail_next(function, cudaErrorIllegalAddress);
    {
      auto device = make_cuda_device(0);
      auto store = make_cuda_store({.allocate_device = {},
                                    .device_budget = nullptr,
                                    .host_budget = std::make_shared<Budget>(1 << 20),
                                    .warn = {}});
      BlockPtr host = store->allocate_host(4096, "test");
      device->synchronize(device->record(device->create_stream(kUp)));
    }
    CHECK(cudart_standin::failure_was_met());
    CHECK_EQ(static_cast<int>(cudaGetLastError()), static_cast<int>(cudaSuccess));
    cudart_standin::clean_up();
  }
}

TEST_CASE("everything made is destroyed, and no callback calls CUDA") {
  cudart_standin::reset();
  for (int round = 0; round < 3; ++round) {
    std::size_t calls_from_callbacks = 1;
    {
      auto device = make_cuda_device(1);
      const StreamId up = device->create_stream(kUp);
      std::vector<std::byte> a(256), b(256);
      cudart_standin::hold(cudaMemcpyHostToDevice);
      device->copy_async(a.data(), b.data(), 256, up);
      std::promise<void> called;
      device->when_complete(device->record(up), [&] { called.set_value(); });
      cudart_standin::release_all(cudaMemcpyHostToDevice);
      get_soon(called.get_future());
      calls_from_callbacks = cudart_standin::num_violations();
    }
    CHECK_EQ(calls_from_callbacks, std::size_t{0});
    CHECK_EQ(cudart_standin::num_streams(), std::size_t{0});
    CHECK_EQ(cudart_standin::num_events(), std::size_t{0});
  }
}

TEST_CASE("events and waiting streams are used again") {
  cudart_standin::reset();
  auto device = make_cuda_device(0);
  const StreamId up = device->create_stream(kUp);
  std::vector<std::byte> a(256), b(256);
  for (int round = 0; round < 50; ++round) {
    cudart_standin::hold(cudaMemcpyHostToDevice);
    device->copy_async(a.data(), b.data(), 256, up);
    std::promise<void> called;
    device->when_complete(device->record(up), [&] { called.set_value(); });
    cudart_standin::release_all(cudaMemcpyHostToDevice);
    get_soon(called.get_future());
  }
  CHECK_EQ(cudart_standin::num_events(), std::size_t{1});
  CHECK_EQ(cudart_standin::num_streams(), std::size_t{2});
}

TEST_CASE("a device destroyed with a callback pending still runs it") {
  cudart_standin::reset();
  std::vector<std::byte> a(256), b(256);
  std::promise<void> called;
  cudart_standin::hold(cudaMemcpyHostToDevice);
  {
    auto device = make_cuda_device(0);
    const StreamId up = device->create_stream(kUp);
    device->copy_async(a.data(), b.data(), 256, up);
    device->when_complete(device->record(up), [&] { called.set_value(); });
  }
  cudart_standin::release_all(cudaMemcpyHostToDevice);
  get_soon(called.get_future());
  cudart_standin::reset();
  CHECK_EQ(cudart_standin::num_violations(), std::size_t{0});
}

TEST_CASE("the caller's current device is put back") {
  cudart_standin::reset();
  CHECK(cudaSetDevice(0) == cudaSuccess);
  auto device = make_cuda_device(1);
  device->synchronize(device->record(device->create_stream(kUp)));
  int current = -1;
  CHECK(cudaGetDevice(&current) == cudaSuccess);
  CHECK_EQ(current, 0);
}

TEST_CASE("the compute stream is the one last set by the calling thread") {
  cudart_standin::reset();
  auto device = make_cuda_device(0);
  cudaStream_t mine = nullptr, theirs = nullptr;
  CHECK(cudaStreamCreateWithFlags(&mine, cudaStreamNonBlocking) == cudaSuccess);
  CHECK(cudaStreamCreateWithFlags(&theirs, cudaStreamNonBlocking) == cudaSuccess);
  std::vector<std::byte> a(256), b(256);
  cudart_standin::hold(cudaMemcpyDefault);
  device->set_compute_stream(reinterpret_cast<std::uintptr_t>(mine));
  device->copy_async(a.data(), b.data(), 256, kComputeStream);  // `mine` stands still now
  const Event on_mine = device->record(kComputeStream);
  get_soon(std::async(std::launch::async, [&] {
    device->set_compute_stream(reinterpret_cast<std::uintptr_t>(theirs));
    device->synchronize(device->record(kComputeStream));  // `theirs` is idle
  }));
  CHECK(!device->query(on_mine));
  device->set_compute_stream(0);  // looked up at each call, never kept
  device->synchronize(device->record(kComputeStream));
  CHECK(!device->query(on_mine));
  cudart_standin::release_all(cudaMemcpyDefault);
  device->synchronize(on_mine);
  CHECK(cudaStreamDestroy(mine) == cudaSuccess);
  CHECK(cudaStreamDestroy(theirs) == cudaSuccess);
  cudart_standin::reset();
}

TEST_CASE("a thread that never set a compute stream gets the one set last") {
  cudart_standin::reset();
  auto device = make_cuda_device(0);
  cudaStream_t mine = nullptr;
  CHECK(cudaStreamCreateWithFlags(&mine, cudaStreamNonBlocking) == cudaSuccess);
  std::vector<std::byte> a(256), b(256);
  cudart_standin::hold(cudaMemcpyDefault);
  device->set_compute_stream(reinterpret_cast<std::uintptr_t>(mine));
  device->copy_async(a.data(), b.data(), 256, kComputeStream);  // `mine` stands still now
  const Event elsewhere =
      get_soon(std::async(std::launch::async, [&] { return device->record(kComputeStream); }));
  CHECK(!device->query(elsewhere));
  cudart_standin::release_all(cudaMemcpyDefault);
  device->synchronize(elsewhere);
  CHECK(cudaStreamDestroy(mine) == cudaSuccess);
  cudart_standin::reset();
}

TEST_CASE("an allocator with a limit of its own gives its figures when it has no memory left") {
  cudart_standin::reset();
  auto store = make_cuda_store(
      {.allocate_device = [](std::size_t) { return std::pair<void*, std::shared_ptr<void>>{}; },
       .device_budget = nullptr,
       .host_budget = std::make_shared<Budget>(1 << 20),
       .warn = {},
       .device_room = [] { return std::pair<std::size_t, std::size_t>(77, 1000); }});
  CHECK_THROWS(store->allocate_device(5000, "slot 2"), OutOfMemory,
               "slot 2 needs 5000 bytes, but 77 are left of 1000");
}

TEST_CASE("without a GPU the count is 0 and the device says what to do") {
  cudart_standin::reset();
  cudart_standin::set_device_count(0);
  CHECK_EQ(cuda_device_count(), 0);
  CHECK_THROWS(make_cuda_device(0), std::invalid_argument, "without a GPU use .to(\"cpu\")");
  cudart_standin::set_device_count(1);
  CHECK_THROWS(make_cuda_device(1), std::invalid_argument, "index is 1, expected 0 to 0");
  CHECK_THROWS(make_cuda_device(-1), std::invalid_argument, "index is -1");
  cudart_standin::fail_next("cudaGetDeviceCount", cudaErrorInsufficientDriver);
  CHECK_EQ(cuda_device_count(), 0);
  CHECK_EQ(static_cast<int>(cudaGetLastError()), static_cast<int>(cudaSuccess));
}

TEST_CASE("host memory counts as readable only where CUDA reads registered pointers") {
  cudart_standin::reset();
  CHECK(make_cuda_device(0)->capabilities().host_memory_readable_by_device);
  cudart_standin::set_host_pointers_readable(false);
  CHECK(!make_cuda_device(0)->capabilities().host_memory_readable_by_device);
}

TEST_CASE("pinned bytes are the bytes asked, in whole pages, and are given back") {
  auto side = make_side();
  {
    // 18944 x 3584 halves are 129.5 MiB; one eighth here. A power of two would be 16.2 -> 32 MiB.
    BlockPtr block = side->store().allocate_host(18944 * 3584 * 2 / 8, "test");
    CHECK(cudart_standin::registered_bytes() < block->bytes() + 4096);
    CHECK_EQ(cudart_standin::registered_bytes(), side->host_budget().used());
  }
  CHECK_EQ(cudart_standin::registered_bytes(), std::size_t{0});
}

TEST_CASE("an allocator that has no memory left gives the driver's figures") {
  cudart_standin::reset();
  auto store = make_cuda_store(
      {.allocate_device = [](std::size_t) { return std::pair<void*, std::shared_ptr<void>>{}; },
       .device_budget = nullptr,
       .host_budget = std::make_shared<Budget>(1 << 20),
       .warn = {}});
  CHECK_THROWS(store->allocate_device(5000, "slot 2"), OutOfMemory,
               "slot 2 needs 5000 bytes, but 4321 are left");
}

TEST_CASE("a device block lives as long as anyone holds it") {
  cudart_standin::reset();
  auto owner = std::make_shared<int>(0);
  auto store = make_cuda_store(
      {.allocate_device =
           [&](std::size_t) { return std::pair<void*, std::shared_ptr<void>>(owner.get(), owner); },
       .device_budget = nullptr,
       .host_budget = std::make_shared<Budget>(1 << 20),
       .warn = {}});
  BlockPtr block = store->allocate_device(sizeof(int), "test");
  store.reset();
  CHECK_EQ(owner.use_count(), 2);
  block.reset();
  CHECK_EQ(owner.use_count(), 1);
}

TEST_CASE("a context that breaks down ends the jobs of a lane with its error") {
  const std::vector<std::byte> sent = pattern(1 << 20, 1);
  std::vector<std::byte> received(256);
  BlockPtr block;
  auto side = make_side();
  block = side->store().allocate_device(1 << 20, "test");
  std::promise<std::string> first, waiting;
  {
    TransferLane lane(side->device(), kUp, 1 << 16);
    side->hold(kDown);
    const StreamId down = side->device().create_stream(kDown);
    side->device().copy_async(received.data(), block->data(), 256, down);
    const Event never = side->device().record(down);
    const auto report = [](std::promise<std::string>& promise) {
      return [&promise](std::exception_ptr failure) {
        try {
          if (failure) std::rethrow_exception(failure);
          promise.set_value("no error");
        } catch (const std::exception& error) {
          promise.set_value(error.what());
        }
      };
    };
    side->hold(kUp);
    CopyJob job{.segments = {{block->data(), sent.data(), sent.size()}}, .done = report(first)};
    lane.submit(std::move(job));
    CopyJob after{
        .segments = {{block->data(), sent.data(), 256}}, .after = never, .done = report(waiting)};
    lane.submit(std::move(after));
    cudart_standin::break_down(cudaErrorIllegalAddress);  // no callback will ever run
    CHECK(get_soon(first.get_future()).find("illegal memory access") != std::string::npos);
    CHECK(get_soon(waiting.get_future()).find("illegal memory access") != std::string::npos);
  }
  // In a broken context nothing could be destroyed. First of all, while it is still broken: a
  // stream that has not looked yet would find it whole again and copy into memory that is gone.
  cudart_standin::clean_up();
  block.reset();
  side.reset();
}

}  // namespace
}  // namespace autohete::testing
