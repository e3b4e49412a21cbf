// What the CUDA files share: error checks and the current device. The only header here that
// includes CUDA; nothing outside cuda_*.cpp includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "csrc/base/check.h"
#include "csrc/device/store.h"

namespace autohete::cuda {

inline std::string describe(const char* call, cudaError_t error) {
  return concat("cuda device: ", call, " failed: ", cudaGetErrorString(error), " (error ",
                static_cast<int>(error), ")");
}

// Throws for everything but success, and clears the error so that torch does not meet it later.
inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  if (error == cudaErrorMemoryAllocation) {
    throw OutOfMemory(describe(call, error) + "; lower gpu_mem to leave room for CUDA itself", 0,
                      0);
  }
  throw std::runtime_error(
      describe(call, error) +
      "; restart the process (an error can leave CUDA unusable), and if it comes back run with "
      "CUDA_LAUNCH_BLOCKING=1 to see which operation fails first");
}

// For ends of things, which have no one to tell: drops the error, so that torch does not meet it.
inline void ignore(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
}

// Makes `index` the thread's current device and puts the former one back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int index) {
    check(cudaGetDevice(&former_), "cudaGetDevice");
    if (former_ == index) return;
    check(cudaSetDevice(index), "cudaSetDevice");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) ignore(cudaSetDevice(former_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_ = 0;
  bool changed_ = false;
};

}  // namespace autohete::cuda
