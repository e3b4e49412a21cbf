#include "csrc/base/cpu_count.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace autohete {
namespace {

std::optional<double> v2_limit(const std::string& directory) {
  std::ifstream file(directory + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return std::nullopt;
  return std::atof(quota.c_str()) / period;
}

std::optional<double> v1_limit(const std::string& directory) {
  std::ifstream quota_file(directory + "/cpu.cfs_quota_us");
  std::ifstream period_file(directory + "/cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (!(quota_file >> quota) || !(period_file >> period)) return std::nullopt;
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// The tightest limit from `path` up to the mount point. Inside a container the path may name
// groups of the host that cannot be seen here; the mount point then is the container's own group.
template <typename Limit>
double tightest(const std::string& mount, std::string path, Limit limit, double found) {
  while (true) {
    if (const auto cpus = limit(mount + path)) {
      found = found == 0 ? *cpus : std::min(found, *cpus);
    }
    const std::size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return found;
    path.resize(slash);
  }
}

bool lists_cpu(const std::string& controllers) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "cpu") return true;
  }
  return false;
}

}  // namespace

int affinity_cpus() {
#if defined(__linux__)
  // Machines with more CPUs than one cpu_set_t holds need a larger mask; grow until it fits.
  for (int cpus = CPU_SETSIZE; cpus <= (1 << 20); cpus *= 2) {
    std::vector<unsigned long> mask(CPU_ALLOC_SIZE(cpus) / sizeof(unsigned long));
    auto* set = reinterpret_cast<cpu_set_t*>(mask.data());
    const std::size_t bytes = CPU_ALLOC_SIZE(cpus);
    if (sched_getaffinity(0, bytes, set) == 0) return std::max(1, CPU_COUNT_S(bytes, set));
  }
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

int cgroup_cpu_quota(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  const std::string sys = root + "/sys/fs/cgroup";
  double cpus = 0;
  for (std::string line; std::getline(groups, line);) {  // hierarchy:controllers:path
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      cpus = tightest(sys, path, v2_limit, cpus);
      cpus = tightest(sys + "/unified", path, v2_limit, cpus);
    } else if (lists_cpu(controllers)) {
      cpus = tightest(sys + "/cpu", path, v1_limit, cpus);
      cpus = tightest(sys + "/" + controllers, path, v1_limit, cpus);
    }
  }
  return cpus == 0 ? 0 : std::max(1, static_cast<int>(cpus));
}

int cpus_for_rank(int affinity, int quota, const char* local_world_size) {
  const int cpus = quota > 0 ? std::min(affinity, quota) : affinity;
  const int ranks = local_world_size == nullptr ? 1 : std::atoi(local_world_size);
  return std::max(1, cpus / std::max(1, ranks));
}

}  // namespace autohete
