// Runs tasks of unequal size on the host's threads: each worker takes the next one until none is left.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <tuple>

#include "moepack/parallel.h"

namespace moepack {

// body(worker, task) for every task in [0, count); worker < parallel.threads.
template <class Body>
struct Phase {
  std::int64_t count;
  Body body;
};
template <class Body>
Phase(std::int64_t, Body) -> Phase<Body>;

// The tasks of one phase that are taken and those that are done, each on a cache line of its own.
struct Progress {
  alignas(64) std::atomic<std::int64_t> taken{0};
  alignas(64) std::atomic<std::int64_t> done{0};

  template <class Body>
  void work(const Phase<Body>& phase, int worker) {
    std::int64_t own = 0;
    for (std::int64_t task; (task = taken.fetch_add(1, std::memory_order_relaxed)) < phase.count; ++own)
      phase.body(worker, task);
    done.fetch_add(own, std::memory_order_release);
  }

  // Whoever waits has found every task taken, so by a worker that runs: the pool need not run all at once. Between the
  // phases of a call the wait is short; a thread that lost its core to another one gets it back.
  void wait(std::int64_t count) const {
    constexpr int spins = 10'000;
    for (int i = 0; done.load(std::memory_order_acquire) < count; ++i)
      if (i >= spins) std::this_thread::yield();
  }
};

// One phase after the other, each when all tasks of the one before are done. Threads are woken once for all.
template <class... Body>
void run_phases(const ParallelFor& parallel, const Phase<Body>&... phases) {
  const std::int64_t most = std::max({phases.count...});
  const int workers = static_cast<int>(std::min<std::int64_t>(most, parallel.threads));
  if (workers <= 1) {
    const auto alone = [](const auto& phase) {
      for (std::int64_t task = 0; task < phase.count; ++task) phase.body(0, task);
    };
    (alone(phases), ...);
    return;
  }
  struct Shared {
    std::tuple<const Phase<Body>&...> phases;
    Progress progress[sizeof...(Body)];

    void work(int worker) {
      Progress* current = progress;
      const auto next = [&](const auto& phase) {
        current->work(phase, worker);
        if (current + 1 != progress + sizeof...(Body)) current->wait(phase.count);
        ++current;
      };
      std::apply([&](const auto&... phase) { (next(phase), ...); }, phases);
    }
  } shared{{phases...}, {}};
  parallel.run(
      parallel.pool, workers, [](void* argument, int worker) { static_cast<Shared*>(argument)->work(worker); },
      &shared);
}

template <class Body>
void run_tasks(const ParallelFor& parallel, std::int64_t count, const Body& body) {
  run_phases(parallel, Phase{count, [&body](int worker, std::int64_t task) { body(worker, task); }});
}

}  // namespace moepack
