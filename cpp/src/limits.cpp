#include "moepack/limits.h"

#include <atomic>
#include <cstring>

#include "gemm/registry.h"
#include "tasks.h"

namespace moepack {

std::uint64_t read_memory(const std::uint8_t* bytes, std::int64_t count, bool ahead, const ParallelFor& parallel) {
  constexpr std::int64_t line = 64, words = line / sizeof(std::uint64_t);
  const std::int64_t lines = count / line, part = (lines + parallel.threads - 1) / parallel.threads;
  std::atomic<std::uint64_t> total{0};
  run_tasks(parallel, parallel.threads, [&](int, std::int64_t task) {
    std::uint64_t sums[words] = {};
    const std::int64_t end = part * (task + 1) < lines ? part * (task + 1) : lines;
    for (std::int64_t i = part * task; i < end; ++i) {
      const std::uint8_t* at = bytes + i * line;
      if (ahead) __builtin_prefetch(at + gemm::kPrefetchBytes);
      std::uint64_t values[words];
      std::memcpy(values, at, line);
      for (std::int64_t w = 0; w < words; ++w) sums[w] += values[w];
    }
    for (const std::uint64_t sum : sums) total += sum;
  });
  return total;
}

Status int4_peak(std::int64_t rounds, std::int64_t& macs) {
  const gemm::Kernel* kernel = nullptr;
  Status status = gemm::active_kernel(kernel);
  if (status.ok()) macs = kernel->int4_peak(rounds);
  return status;
}

}  // namespace moepack
