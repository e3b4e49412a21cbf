// The CUDA side of the seam, on the CUDA runtime API alone. This header needs no CUDA; its .cpp is
// compiled where CUDA headers are found.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "csrc/device/budget.h"
#include "csrc/device/device.h"
#include "csrc/device/store.h"

namespace autohete {

// GPUs that the driver shows; 0 without a GPU or driver. Never throws.
int cuda_device_count();

// Every failing runtime call becomes std::runtime_error (OutOfMemory when memory is short) with the
// call, CUDA's own words and what to do. The caller's current device is left as it was.
//
// Callbacks run on a thread of the driver. After an error that ends the CUDA context the driver
// runs no more callbacks: whoever waits for one must look at query() now and then, which throws.
//
// Throws std::invalid_argument when there is no GPU `index`.
std::unique_ptr<Device> make_cuda_device(int index);

struct CudaStoreOptions {
  int index = 0;
  // Gives device memory (the bindings pass torch's caching allocator): the address and what keeps
  // it alive. A null address says that there is none left. Called on the allocating thread.
  std::function<std::pair<void*, std::shared_ptr<void>>(std::size_t bytes)> allocate_device;
  std::shared_ptr<Budget> device_budget;  // null: only the allocator limits
  // Free bytes and limit of an allocator with a limit of its own, for the message when it has none
  // left. Null: the GPU's.
  std::function<std::pair<std::size_t, std::size_t>()> device_room{};
  std::shared_ptr<Budget> host_budget;
  bool pin = true;                               // false: host blocks are pageable
  std::function<void(const std::string&)> warn;  // told once when pinning is refused
};

// Host blocks are mapped at their exact size and registered with CUDA (portable and mapped: every
// device reads them at the host's own address, where capabilities() says so).
std::unique_ptr<Store> make_cuda_store(CudaStoreOptions options);

}  // namespace autohete
