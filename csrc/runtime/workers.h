// The CPU workers: the only place that knows oneTBB. Arithmetic only; nothing that waits runs here.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace autohete {

// min(affinity, cgroup quota) / local ranks (LOCAL_WORLD_SIZE), at least 1. OMP_NUM_THREADS is not
// looked at.
int default_num_workers();

// Runs tiles on `num_workers` threads, the caller among them. A sleeping worker or a busy
// neighbour cannot stall a small job: the caller claims tiles too and waits only for tiles already
// claimed. Any thread may call; calls from different threads share the workers. In a forked child
// everything runs on the caller.
class Workers {
 public:
  explicit Workers(int num_workers);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int num_workers() const;

  // Calls body(tile) once for each tile in [0, num_tiles), in any order, and returns when all have
  // returned. Rethrows the first exception after the tiles already started have ended.
  void for_each_tile(std::size_t num_tiles, const std::function<void(std::size_t)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace autohete
