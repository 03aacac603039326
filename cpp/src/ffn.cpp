// The whole block: route, then the experts.
#include "moepack/ffn.h"

#include <algorithm>

#include "workspace.h"

namespace moepack {

namespace {

// Ids and weights first; then routing and the experts, one after the other, in the same memory.
struct Buffers {
  Buffers(const Shape& shape, void* base) : arena(base) {
    ids = arena.take<std::int64_t>(shape.T * shape.K);
    weights = arena.take<float>(shape.T * shape.K);
    rest = arena.take<std::uint8_t>(0);
  }

  Arena arena;
  std::int64_t* ids;
  float* weights;
  std::uint8_t* rest;
};

}  // namespace

std::size_t ffn_workspace_bytes(const Shape& shape, const ExpertAttributes& attributes, int threads) {
  return Buffers(shape, nullptr).arena.used() +
         std::max(route_workspace_bytes(shape, threads), experts_workspace_bytes(shape, attributes, threads));
}

Status quantized_moe_ffn(const Shape& shape, const RoutingAttributes& routing, const RouterTensors& router,
                         const ExpertAttributes& attributes, const ExpertTensors& experts, const void* x, DType dtype,
                         void* out, void* workspace, const ParallelFor& parallel) {
  const Buffers buffers(shape, workspace);
  if (Status status = route(shape, routing, router, x, dtype, buffers.ids, buffers.weights, buffers.rest, parallel);
      !status.ok())
    return status;
  return quantized_experts(shape, attributes, experts, x, dtype, buffers.ids, buffers.weights, out, buffers.rest,
                           parallel);
}

}  // namespace moepack
