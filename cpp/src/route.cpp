// The router: logits of blocks of tokens, then the selection of each token.
#include <algorithm>

#include "dtype.h"
#include "gemm/registry.h"
#include "moepack/ffn.h"
#include "selection.h"
#include "tasks.h"
#include "workspace.h"

namespace moepack {
namespace {

constexpr std::int64_t kTokensPerTask = 8;  // one pass over the router's weights serves so many
constexpr std::int64_t kExpertsPerTask = 16;

// With many tokens a task takes some of them through the whole router; with few, tasks share a token's experts.
bool by_token(const Shape& shape, int threads) { return shape.T >= 2 * threads; }

struct Buffers {
  Buffers(const Shape& shape, int threads, void* base) : arena(base) {
    const std::int64_t logit_rows = by_token(shape, threads) ? threads * kTokensPerTask : shape.T;
    logits = arena.take<float>(logit_rows * shape.E);
    keys = arena.take<std::int32_t>(threads * 2 * shape.E);
    rows = arena.take<float>(threads * shape.D);
  }

  Arena arena;
  float* logits;
  std::int32_t* keys;
  float* rows;  // one converted row of x per worker
};

struct Router {
  const Shape& shape;
  const RouterTensors& tensors;
  const void* x;
  DType dtype;
  std::string_view round_to;
  const gemm::Kernel& kernel;

  void logits(std::int64_t token, std::int64_t first, std::int64_t count, float* row, float* out) const {
    const float* values = to_float(x, dtype, token * shape.D, shape.D, row);
    kernel.router(values, tensors.gate_weight + first * shape.D, shape.D, static_cast<int>(count), out);
    for (std::int64_t e = 0; e < count; ++e) {
      if (tensors.gate_bias) out[e] = out[e] + tensors.gate_bias[first + e];
      if (round_to == "bfloat16") out[e] = float_from_bf16(bf16_from_float(out[e]));
      if (round_to == "float16") out[e] = float_from_half(half_from_float(out[e]));
    }
  }
};

}  // namespace

std::size_t route_workspace_bytes(const Shape& shape, int threads) {
  return Buffers(shape, threads, nullptr).arena.used();
}

Status route(const Shape& shape, const RoutingAttributes& routing, const RouterTensors& tensors, const void* x,
             DType dtype, std::int64_t* topk_ids, float* topk_weights, void* workspace, const ParallelFor& parallel) {
  const gemm::Kernel* kernel = nullptr;
  if (Status status = gemm::active_kernel(kernel); !status.ok()) return status;
  const Buffers buffers(shape, parallel.threads, workspace);
  const Selection select(shape, routing, tensors.expert_bias, *kernel);
  const Router router{shape, tensors, tensors.router_x ? tensors.router_x : x, dtype, routing.router_dtype, *kernel};
  const auto keys = [&](int worker) { return buffers.keys + worker * 2 * shape.E; };
  const auto row = [&](int worker) { return buffers.rows + worker * shape.D; };

  if (by_token(shape, parallel.threads)) {
    run_tasks(parallel, (shape.T + kTokensPerTask - 1) / kTokensPerTask, [&](int worker, std::int64_t task) {
      float* logits = buffers.logits + worker * kTokensPerTask * shape.E;
      const std::int64_t begin = task * kTokensPerTask, end = std::min(begin + kTokensPerTask, shape.T);
      for (std::int64_t first = 0; first < shape.E; first += kExpertsPerTask)
        for (std::int64_t t = begin; t < end; ++t)
          router.logits(t, first, std::min(kExpertsPerTask, shape.E - first), row(worker),
                        logits + (t - begin) * shape.E + first);
      for (std::int64_t t = begin; t < end; ++t)
        select(logits + (t - begin) * shape.E, keys(worker), topk_ids + t * shape.K, topk_weights + t * shape.K);
    });
    return {};
  }
  const std::int64_t blocks = (shape.E + kExpertsPerTask - 1) / kExpertsPerTask;
  run_tasks(parallel, shape.T * blocks, [&](int worker, std::int64_t task) {
    const std::int64_t t = task / blocks, first = task % blocks * kExpertsPerTask;
    router.logits(t, first, std::min(kExpertsPerTask, shape.E - first), row(worker),
                  buffers.logits + t * shape.E + first);
  });
  for (std::int64_t t = 0; t < shape.T; ++t)
    select(buffers.logits + t * shape.E, keys(0), topk_ids + t * shape.K, topk_weights + t * shape.K);
  return {};
}

}  // namespace moepack
