// Runs tasks of unequal size on the host's threads: each worker takes the next one until none is left.
#pragma once

#include <atomic>
#include <cstdint>

#include "moepack/parallel.h"

namespace moepack {

// body(worker, task) for every task in [0, count); worker < parallel.threads.
template <class Body>
void run_tasks(const ParallelFor& parallel, std::int64_t count, const Body& body) {
  const int workers = static_cast<int>(count < parallel.threads ? count : parallel.threads);
  if (workers <= 1) {
    for (std::int64_t task = 0; task < count; ++task) body(0, task);
    return;
  }
  struct Shared {
    const Body& body;
    std::int64_t count;
    std::atomic<std::int64_t> next{0};
  } shared{body, count};
  parallel.run(
      parallel.pool, workers,
      [](void* argument, int worker) {
        Shared& s = *static_cast<Shared*>(argument);
        for (;;) {
          const std::int64_t task = s.next.fetch_add(1, std::memory_order_relaxed);
          if (task >= s.count) return;
          s.body(worker, task);
        }
      },
      &shared);
}

}  // namespace moepack
