// How many CPUs this process may use.
#pragma once

#include <string>

namespace autohete {

// CPUs in this thread's affinity mask, at least 1.
int affinity_cpus();

// The tightest cgroup limit (v2 cpu.max, v1 cpu.cfs_quota_us) of this process's group and of the
// groups above it, in CPUs, rounded down and at least 1; 0: no limit. `root` is put before /proc
// and /sys (tests point it at a made-up tree).
int cgroup_cpu_quota(const std::string& root = "");

// min(affinity, quota) / local ranks, at least 1. `local_world_size` is the text of
// LOCAL_WORLD_SIZE; null or not a positive number counts as one rank.
int cpus_for_rank(int affinity, int quota, const char* local_world_size);

}  // namespace autohete
