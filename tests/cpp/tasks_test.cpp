#include "tasks.h"

#include <gtest/gtest.h>

#include <atomic>
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
