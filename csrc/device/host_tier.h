// Host memory for blocks: counted against a budget and pinned where the device can pin. Both stores
// allocate their host blocks here; only the way to pin differs.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "csrc/device/budget.h"
#include "csrc/device/store.h"

namespace autohete {

// How a device pins. Called from any thread.
class Pinner {
 public:
  virtual ~Pinner() = default;
  // Pins the pages; returns an empty string, or the reason why they were refused.
  virtual std::string pin(void* data, std::size_t bytes) = 0;
  virtual void unpin(void* data) = 0;
};

// Throws OutOfMemory: "<where>: <what> needs N bytes, M are left of L; <advice>".
[[noreturn]] void throw_out_of_memory(const std::string& where, const std::string& what,
                                      std::size_t asked_bytes, std::size_t free_bytes,
                                      std::size_t limit_bytes, const std::string& advice);

class HostTier {
 public:
  // A null `pinner` pins nothing. `warn` (may be empty) gets one message, the first time pinning
  // is refused; from then on blocks are pageable.
  HostTier(std::shared_ptr<Budget> budget, std::shared_ptr<Pinner> pinner,
           std::function<void(const std::string&)> warn);

  // Zero-filled; data() is page aligned. The budget counts whole pages. Throws OutOfMemory. Any
  // thread.
  BlockPtr allocate(std::size_t bytes, const std::string& what, Pages pages);

  bool pins() const { return pinner_ && !refused_; }
  const std::shared_ptr<Budget>& budget() const { return budget_; }

 private:
  void remember_refusal(const std::string& reason, std::size_t bytes, const std::string& what);

  const std::shared_ptr<Budget> budget_;
  const std::shared_ptr<Pinner> pinner_;
  const std::function<void(const std::string&)> warn_;
  std::atomic<bool> refused_{false};
  std::atomic<std::size_t> pinned_bytes_{0};  // until pinning was refused
};

}  // namespace autohete
