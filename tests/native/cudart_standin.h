// A stand-in of ours for the CUDA runtime functions that csrc/device/cuda_*.cpp calls: real threads
// and real copies on the CPU, two devices, no GPU. It is stricter than CUDA where that finds our
// mistakes: a stream used while another device is current, a call from a callback, a handle used
// after its end are errors.
//
// What it cannot show: CUDA's own timing, kernels, and anything its documentation leaves open.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cudart_standin {

// Waits for work left over, then all state back to the start: no failures, nothing held.
void reset();
// Ends the handles and registrations that a test left behind on purpose.
void clean_up();

// The functions it stands in for, as named in CUDA.
std::vector<std::string> function_names();
// The next call of `function` (on any thread) returns `error` and does nothing else.
void fail_next(const std::string& function, cudaError_t error);
// True when the failure asked for has been met.
bool failure_was_met();
// From now on every call fails with `error` and no callback runs, like a context that broke down.
void break_down(cudaError_t error);

void hold(cudaMemcpyKind kind);
void release(cudaMemcpyKind kind, std::size_t num_copies);
void release_all(cudaMemcpyKind kind);
void random_delays(std::uint64_t seed, double max_seconds);

// cudaHostRegister is refused once more than this is registered.
void limit_registered_bytes(std::size_t bytes);
std::size_t registered_bytes();
void set_device_count(int count);
void set_host_pointers_readable(bool readable);

// Live handles, for tests that nothing is left behind.
std::size_t num_streams();
std::size_t num_events();
// Broken rules that no return code can show: CUDA calls made from callbacks.
std::size_t num_violations();
// How often `function` was called since reset().
std::size_t num_calls(const std::string& function);

}  // namespace cudart_standin
