#include "tasks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <vector>

#include "made.h"

namespace moepack {
namespace {

void expect_every_task_once(const ParallelFor& parallel, std::int64_t count) {
  std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
  run_tasks(parallel, count, [&](int worker, std::int64_t task) {
    EXPECT_GE(worker, 0);
    EXPECT_LT(worker, parallel.threads);
    ++runs[static_cast<std::size_t>(task)];
  });
  for (const auto& n : runs) ASSERT_EQ(n, 1);
}

TEST(Tasks, EveryTaskRunsOnce) {
  for (const int threads : made::kThreads)
    for (const std::int64_t count : {0, 1, 2, 4, 5, 6, 1000}) expect_every_task_once(made::threads(threads), count);
}

// A pool may run its workers one after the other: the first one then takes all tasks.
TEST(Tasks, APoolMayBeBusy) {
  ParallelFor one_after_the_other = serial();
  one_after_the_other.threads = 4;
  expect_every_task_once(one_after_the_other, 100);
}

// Two tasks never share a worker's scratch at the same time.
TEST(Tasks, AWorkerDoesOneTaskAtATime) {
  std::vector<std::atomic<int>> busy(5);
  run_tasks(made::threads(5), 2000, [&](int worker, std::int64_t) {
    EXPECT_EQ(busy[static_cast<std::size_t>(worker)]++, 0);
    --busy[static_cast<std::size_t>(worker)];
  });
}

// What a task of one phase has written, every task of the next one sees.
void expect_phases_in_order(const ParallelFor& parallel) {
  for (const std::int64_t count : {0, 1, 3, 50}) {
    std::vector<int> first(static_cast<std::size_t>(count)), second(7);
    std::atomic<int> third = 0;
    const Phase write{count, [&](int, std::int64_t task) { first[static_cast<std::size_t>(task)] = 1; }};
    const Phase add{7, [&](int, std::int64_t task) {
                      second[static_cast<std::size_t>(task)] = std::accumulate(first.begin(), first.end(), 0);
                    }};
    const Phase check{5, [&](int, std::int64_t) { third += second == std::vector<int>(7, static_cast<int>(count)); }};
    run_phases(parallel, write, add, check);
    ASSERT_EQ(third, 5) << count;
  }
}

TEST(Tasks, PhasesFollowOneAnother) {
  for (const int threads : made::kThreads)
    for (int i = 0; i < 50; ++i) expect_phases_in_order(made::threads(threads));
  ParallelFor one_after_the_other = serial();
  one_after_the_other.threads = 4;
  expect_phases_in_order(one_after_the_other);
}

TEST(Tasks, NoWorkerIsStartedForNothing) {
  ParallelFor counting{8, [](void* pool, int count, void (*body)(void*, int), void* argument) {
                         *static_cast<int*>(pool) = count;
                         for (int i = 0; i < count; ++i) body(argument, i);
                       }};
  int started = 0;
  counting.pool = &started;
  run_tasks(counting, 3, [](int, std::int64_t) {});
  EXPECT_EQ(started, 3);
  started = 0;
  run_tasks(counting, 1, [](int worker, std::int64_t) { EXPECT_EQ(worker, 0); });
  EXPECT_EQ(started, 0) << "one task is done by the caller";
}

}  // namespace
}  // namespace moepack
