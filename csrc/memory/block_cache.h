// Memory blocks that were freed and wait for a request of their very size, as a GPU's caching
// allocator keeps them. A training step asks for the same sizes again and again; the system's
// allocator looks for neighbours to merge with each time (measured: 2 to 3 percent of a step).
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace autohete {

// What is lent and what waits are together never more than an eighth above the most that was lent
// at once: blocks of sizes that are not asked for any more go back to the system first. Any thread.
class BlockCache {
 public:
  // Smaller blocks the system's allocator has at hand itself.
  static constexpr std::size_t kSmallest = 4096;

  using Free = void (*)(void*);
  explicit BlockCache(Free free) : free_(free) {}
  ~BlockCache();  // nobody else has it any more, so without the lock
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  // A block of exactly so many bytes that waits, which is lent from here on; or null: then the
  // caller takes one from the system and says so with lend().
  void* take(std::size_t bytes);
  void lend(std::size_t bytes);
  // The block comes back.
  void put(void* block, std::size_t bytes);
  // Everything that waits goes back to the system; what was lent before is forgotten.
  void clear();

  std::size_t waiting_bytes() const;

 private:
  struct Size {
    std::vector<void*> blocks;
    std::uint64_t last_asked = 0;
  };
  void make_room(std::vector<void*>& out);

  const Free free_;
  mutable std::mutex mutex_;
  std::unordered_map<std::size_t, Size> sizes_;
  std::uint64_t asked_ = 0;
  std::size_t lent_ = 0, most_lent_ = 0, waiting_ = 0;
};

}  // namespace autohete
