// The operator: routing, grouped GEMMs with w1 and w3 fused, activation, weighted sum.
// docs/reference/op.md states the formulas and the order of every floating-point operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "moepack/parallel.h"
#include "moepack/status.h"

namespace moepack {

enum class DType { f32, bf16, f16 };

// Sizes. T tokens, D model width, F inner size of the experts, E experts, K experts per token.
struct Shape {
  std::int64_t T, D, F, E, K;
};

// The attributes of the op's schema, as strings and numbers; check_* refuses what is not supported.
struct ExpertAttributes {
  std::string_view scheme;
  std::string_view layout;
  std::string_view activation;
  double act_alpha = 1.0;
  double act_limit = 0.0;
  double gate_softcap = 0.0;
  double up_softcap = 0.0;
  bool limit_after_act = false;
  bool weight_on_input = false;
};

struct RoutingAttributes {
  std::string_view score_func;
  bool norm_topk = false;
  double norm_eps = 0.0;
  bool norm_clamp = false;
  double route_scale = 1.0;
  std::int64_t n_group = 1;
  std::int64_t topk_group = 1;
  std::string_view group_score;
  std::string_view router_dtype;
};

// Lengths and shapes that a caller has to hold against Shape. -1 where a tensor is absent.
struct ExpertSizes {
  std::int64_t experts13, bytes13;  // packed_w13 [E, bytes]
  std::int64_t experts2, bytes2;    // packed_w2 [E, bytes]
  std::int64_t bias13 = -1;         // number of elements of bias13 [E, 2F]
  std::int64_t bias2 = -1;          // number of elements of bias2 [E, D]
};

// Refuses attributes and sizes that the op does not support. Contents of the blobs are not looked at.
Status check_experts(const Shape& shape, const ExpertAttributes& attributes, const ExpertSizes& sizes);
Status check_routing(const Shape& shape, const RoutingAttributes& attributes);

struct ExpertTensors {
  const std::uint8_t* packed_w13;
  const std::uint8_t* packed_w2;
  std::int64_t bytes13, bytes2;  // per expert
  const float* bias13 = nullptr;
  const float* bias2 = nullptr;
};

struct RouterTensors {
  const void* router_x = nullptr;      // [T, D], DType of x; nullptr: x itself
  const float* gate_weight = nullptr;  // [E, D]
  const float* gate_bias = nullptr;    // [E] or nullptr
  const float* expert_bias = nullptr;  // [E] or nullptr, for selection only
};

// Bytes of scratch that a call needs, for `threads` workers; 64-byte aligned memory is expected.
std::size_t experts_workspace_bytes(const Shape& shape, const ExpertAttributes& attributes, int threads);
std::size_t ffn_workspace_bytes(const Shape& shape, const ExpertAttributes& attributes, int threads);

// x, out [T, D] of dtype, contiguous; topk_ids [T, K], topk_weights [T, K].
// Both have passed check_*; contents of headers and ids are checked here, nothing is written on error.
Status quantized_experts(const Shape& shape, const ExpertAttributes& attributes, const ExpertTensors& experts,
                         const void* x, DType dtype, const std::int64_t* topk_ids, const float* topk_weights, void* out,
                         void* workspace, const ParallelFor& parallel);

Status quantized_moe_ffn(const Shape& shape, const RoutingAttributes& routing, const RouterTensors& router,
                         const ExpertAttributes& attributes, const ExpertTensors& experts, const void* x, DType dtype,
                         void* out, void* workspace, const ParallelFor& parallel);

// Routing alone: topk_ids [T, K], topk_weights [T, K].
std::size_t route_workspace_bytes(const Shape& shape, int threads);
Status route(const Shape& shape, const RoutingAttributes& routing, const RouterTensors& router, const void* x,
             DType dtype, std::int64_t* topk_ids, float* topk_weights, void* workspace, const ParallelFor& parallel);

}  // namespace moepack
