#include "csrc/device/mapped_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <new>

namespace autohete {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::byte* map_pages(std::size_t bytes) {
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(start);
}

// Maps one huge page more than asked and gives the ends back, so that the rest starts on a border.
std::byte* map_huge_pages(std::size_t bytes) {
  std::byte* start = map_pages(bytes + kHugePage);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(start) & (kHugePage - 1);
  if (head > 0) munmap(start, head);
  std::byte* data = start + head;
  if (head < kHugePage) munmap(data + bytes, kHugePage - head);
#ifdef MADV_HUGEPAGE
  madvise(data, bytes, MADV_HUGEPAGE);  // a wish: without it the memory is slower, not wrong
#endif
  return data;
}

std::size_t page_bytes() {
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return page;
}

// False where the kernel does not know the call, or a sandbox does not let it through.
bool populate([[maybe_unused]] std::byte* data, [[maybe_unused]] std::size_t bytes) {
#ifdef __linux__
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers do not have
  while (madvise(data, bytes, kPopulateWrite) != 0) {
    if (errno == ENOMEM || errno == EFAULT) throw std::bad_alloc();
    if (errno != EINTR) return false;
  }
  return true;
#else
  return false;
#endif
}

}  // namespace

std::size_t MappedMemory::rounded(std::size_t bytes) {
  const std::size_t page = page_bytes();
  if (bytes > SIZE_MAX - kHugePage - page) throw std::bad_alloc();
  return (std::max<std::size_t>(bytes, 1) + page - 1) / page * page;
}

MappedMemory::MappedMemory(std::size_t bytes)
    : mapped_bytes_(rounded(bytes)),
      data_(mapped_bytes_ >= kHugePage ? map_huge_pages(mapped_bytes_) : map_pages(mapped_bytes_)) {
}

void MappedMemory::make_present() {
  if (populate(data_, mapped_bytes_)) return;
  for (std::size_t offset = 0; offset < mapped_bytes_; offset += page_bytes()) {
    volatile std::byte* byte = data_ + offset;
    *byte = *byte;  // a read alone would get the one page of zeros that all share
  }
}

MappedMemory::~MappedMemory() { munmap(data_, mapped_bytes_); }

}  // namespace autohete
