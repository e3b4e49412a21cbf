#include "csrc/memory/block_cache.h"

#include <algorithm>
#include <utility>

namespace autohete {
namespace {

constexpr std::uint64_t kForgotten = 1024;  // requests since a size without blocks was asked for

}  // namespace

BlockCache::~BlockCache() {
  for (const auto& [bytes, size] : sizes_) {
    for (void* const block : size.blocks) free_(block);
  }
}

void* BlockCache::take(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  Size& size = sizes_[bytes];
  size.last_asked = ++asked_;
  if (size.blocks.empty()) return nullptr;
  void* const block = size.blocks.back();
  size.blocks.pop_back();
  waiting_ -= bytes;
  lent_ += bytes;
  most_lent_ = std::max(most_lent_, lent_);
  return block;
}

void BlockCache::lend(std::size_t bytes) {
  std::vector<void*> out;
  {
    std::lock_guard lock(mutex_);
    lent_ += bytes;
    most_lent_ = std::max(most_lent_, lent_);
    make_room(out);
  }
  for (void* const block : out) free_(block);
}

void BlockCache::put(void* block, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  Size& size = sizes_[bytes];
  if (size.last_asked == 0) size.last_asked = asked_;
  size.blocks.push_back(block);
  waiting_ += bytes;
  lent_ -= bytes;
}

void BlockCache::clear() {
  std::unordered_map<std::size_t, Size> sizes;
  {
    std::lock_guard lock(mutex_);
    sizes.swap(sizes_);
    waiting_ = 0;
    most_lent_ = lent_;
  }
  for (const auto& [bytes, size] : sizes) {
    for (void* const block : size.blocks) free_(block);
  }
}

std::size_t BlockCache::waiting_bytes() const {
  std::lock_guard lock(mutex_);
  return waiting_;
}

// With mutex_ held. The sizes that were asked for longest ago go first.
void BlockCache::make_room(std::vector<void*>& out) {
  const std::size_t most = most_lent_ + most_lent_ / 8;
  while (waiting_ > 0 && lent_ + waiting_ > most) {
    auto oldest = sizes_.end();
    for (auto it = sizes_.begin(); it != sizes_.end();) {
      if (it->second.blocks.empty() && asked_ - it->second.last_asked > kForgotten) {
        it = sizes_.erase(it);  // of another batch size
        continue;
      }
      const bool older =
          oldest == sizes_.end() || it->second.last_asked < oldest->second.last_asked;
      if (!it->second.blocks.empty() && older) oldest = it;
      ++it;
    }
    auto& [bytes, size] = *oldest;
    while (!size.blocks.empty() && lent_ + waiting_ > most) {
      out.push_back(size.blocks.back());
      size.blocks.pop_back();
      waiting_ -= bytes;
    }
  }
}

}  // namespace autohete
