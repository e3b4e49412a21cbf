#include "csrc/device/file_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>

namespace autohete {
namespace {

#if defined(__linux__) && defined(MADV_PAGEOUT)

struct Mapping {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  unsigned long inode = 0;  // 0: no file
};

// The fields of proc_pid_maps(5): begin-end permissions offset device inode path.
bool read_mapping(std::FILE* maps, Mapping& mapping) {
  const int fields = std::fscanf(maps, "%zx-%zx %*s %*s %*s %lu%*[^\n]", &mapping.begin,
                                 &mapping.end, &mapping.inode);
  return fields == 3;
}

void page_out(std::uintptr_t begin, std::uintptr_t end) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  begin = (begin + page - 1) / page * page;  // pages shared with a neighbour stay
  end = end / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_PAGEOUT);
}

#endif

}  // namespace

void release_file_pages([[maybe_unused]] const std::vector<AddressRange>& ranges) {
#if defined(__linux__) && defined(MADV_PAGEOUT)
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> maps(std::fopen("/proc/self/maps", "r"),
                                                             &std::fclose);
  Mapping mapping;
  while (maps && read_mapping(maps.get(), mapping)) {
    if (mapping.inode == 0) continue;
    for (const auto& [begin, end] : ranges)
      page_out(std::max(mapping.begin, begin), std::min(mapping.end, end));
  }
#endif
}

}  // namespace autohete
