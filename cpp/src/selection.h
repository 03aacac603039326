// From the router's logits of one token to the ids and weights of its experts.
#pragma once

#include <cstdint>

#include "gemm/kernel.h"
#include "moepack/ffn.h"

namespace moepack {

struct Selection {
  enum class Score { softmax, softmax_all, sigmoid };

  Selection(const Shape& shape, const RoutingAttributes& attributes, const float* expert_bias,
            const gemm::Kernel& kernel);

  // logits [E] are overwritten; keys [2E] is scratch. ids [K], weights [K], best first.
  void operator()(float* logits, std::int32_t* keys, std::int64_t* ids, float* weights) const;

 private:
  void score(float* logits) const;
  void keep_best_groups(const float* scores, std::int32_t* keys) const;
  void weigh(const float* scores, const std::int64_t* ids, float* weights) const;

  const gemm::Kernel& kernel_;
  const float* expert_bias_;
  std::int64_t experts_, top_k_, groups_, kept_groups_;
  Score score_;
  bool top2sum_, norm_, norm_clamp_;
  float norm_eps_, route_scale_;
};

}  // namespace moepack
