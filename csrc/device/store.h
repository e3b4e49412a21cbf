// The memory tiers beside the device seam: where bytes can live, and who counts them.
//
// A Block is contiguous memory in one tier; copies of the shared_ptr keep it alive, so a tensor
// whose DataPtr holds one never dangles. Allocation is exact: no rounding beyond alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

namespace autohete {

enum class Tier : std::uint8_t { kDevice, kHost };  // later: disk

// When the system gives pageable memory its pages. Whoever writes first waits for them otherwise,
// ten times as long as for the bytes.
enum class Pages : std::uint8_t { kNow, kWhenTouched };

// Offsets of tensors inside a block, and block sizes, are multiples of this.
inline constexpr std::size_t kBlockAlignment = 256;
constexpr std::size_t align_up(std::size_t bytes) {
  return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
}

class Block {
 public:
  virtual ~Block() = default;  // returns the memory to its store
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Tier tier() const { return tier_; }

 protected:
  Block(std::byte* data, std::size_t bytes, Tier tier) : data_(data), bytes_(bytes), tier_(tier) {}

 private:
  std::byte* data_;
  std::size_t bytes_;
  Tier tier_;
};
using BlockPtr = std::shared_ptr<Block>;

// Thrown when a tier cannot give the bytes. Bindings turn it into torch.OutOfMemoryError.
class OutOfMemory : public std::exception {
 public:
  OutOfMemory(std::string message, std::size_t asked_bytes, std::size_t free_bytes)
      : message_(std::move(message)), asked_bytes_(asked_bytes), free_bytes_(free_bytes) {}
  const char* what() const noexcept override { return message_.c_str(); }
  std::size_t asked_bytes() const { return asked_bytes_; }
  std::size_t free_bytes() const { return free_bytes_; }

 private:
  std::string message_;
  std::size_t asked_bytes_;
  std::size_t free_bytes_;
};

// Allocates blocks in both tiers of one device. Any thread. Throws OutOfMemory, whose message says
// `what` asked (e.g. "parameters of unit h.3"), how many bytes, and how many were left.
class Store {
 public:
  virtual ~Store() = default;
  // Device memory, counted against the budget. Contents undefined.
  virtual BlockPtr allocate_device(std::size_t bytes, const std::string& what) = 0;
  // Host memory, pinned where the device needs it (and pinning is not refused). Zero-filled.
  // Pinned memory has its pages at once.
  virtual BlockPtr allocate_host(std::size_t bytes, const std::string& what, Pages pages) = 0;
  BlockPtr allocate_host(std::size_t bytes, const std::string& what) {
    return allocate_host(bytes, what, Pages::kWhenTouched);
  }
  // False when nothing is pinned, by choice or after pinning was refused once: later host blocks
  // are pageable.
  virtual bool pins_host_memory() const = 0;
};

}  // namespace autohete
