// Memory straight from the kernel: zero-filled, page aligned, given back to the kernel when freed
// (so a late access is a segmentation fault, not a stale value), and never more than the bytes
// asked rounded up to whole pages.
#pragma once

#include <cstddef>

namespace autohete {

class MappedMemory {
 public:
  // Maps `bytes` (0 takes one page). Blocks of 2 MiB and more start on a huge-page border and are
  // advised to use huge pages. Throws std::bad_alloc. Pages are taken when first touched.
  explicit MappedMemory(std::size_t bytes);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  // Takes all pages now, in one call of the kernel where it has one (Linux 5.14). Bytes stay what
  // they are. Before others have the memory. Throws std::bad_alloc when the kernel has no more.
  void make_present();

  std::byte* data() const { return data_; }
  std::size_t mapped_bytes() const { return mapped_bytes_; }

  // What a mapping of `bytes` really takes.
  static std::size_t rounded(std::size_t bytes);

 private:
  std::size_t mapped_bytes_;
  std::byte* data_;
};

}  // namespace autohete
