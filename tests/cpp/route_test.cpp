// The router: logits and selection of whole batches.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "made.h"
#include "plain.h"

namespace moepack {
namespace {

using Floats = std::vector<float>;

struct Router {
  std::int64_t D, E, K;
  RoutingAttributes attributes;
  Floats weight, gate_bias, expert_bias;  // biases may be empty

  Router(std::int64_t width, std::int64_t experts, std::int64_t top_k, const char* score = "softmax")
      : D(width), E(experts), K(top_k), weight(made::Random(71).floats(width * experts)) {
    attributes.score_func = score;
    attributes.group_score = "max";
    attributes.router_dtype = "float32";
  }

  RouterTensors tensors(const void* router_x = nullptr) const {
    return {router_x, weight.data(), gate_bias.empty() ? nullptr : gate_bias.data(),
            expert_bias.empty() ? nullptr : expert_bias.data()};
  }
};

plain::Selected routed(const Router& router, const made::Values& x, std::int64_t T, int threads = 1,
                       const void* router_x = nullptr) {
  const Shape shape{T, router.D, 1, router.E, router.K};
  made::Workspace workspace(route_workspace_bytes(shape, threads));
  plain::Selected s{std::vector<std::int64_t>(static_cast<std::size_t>(T * router.K), -7),
                    Floats(static_cast<std::size_t>(T * router.K), -7.0f)};
  const Status status = route(shape, router.attributes, router.tensors(router_x), x.data(), x.dtype, s.ids.data(),
                              s.weights.data(), workspace.base(), made::threads(threads));
  EXPECT_TRUE(status.ok()) << status.message();
  return s;
}

float rounded(float logit, std::string_view dtype) {
  if (dtype == "bfloat16") return float_from_bf16(bf16_from_float(logit));
  return dtype == "float16" ? float_from_half(half_from_float(logit)) : logit;
}

plain::Selected expected(const Router& router, const Floats& x, std::int64_t T) {
  plain::Selected all;
  for (std::int64_t t = 0; t < T; ++t) {
    Floats logits;
    for (std::int64_t e = 0; e < router.E; ++e) {
      float logit = plain::router_dot(x.data() + t * router.D, router.weight.data() + e * router.D, router.D);
      if (!router.gate_bias.empty()) logit = logit + router.gate_bias[e];
      logits.push_back(rounded(logit, router.attributes.router_dtype));
    }
    const plain::Selected one = plain::select(logits, router.K, router.attributes,
                                              router.expert_bias.empty() ? nullptr : router.expert_bias.data());
    all.ids.insert(all.ids.end(), one.ids.begin(), one.ids.end());
    all.weights.insert(all.weights.end(), one.weights.begin(), one.weights.end());
  }
  return all;
}

void expect_same(const plain::Selected& a, const plain::Selected& b, const std::string& where) {
  ASSERT_EQ(a.ids, b.ids) << where;
  ASSERT_TRUE(made::same(a.weights, b.weights)) << where;
}

// Few tokens share a token's experts among threads, many are shared by tokens: both ways, every instruction set.
TEST(Route, AnyIsaAnyThreadsAnyBatch) {
  for (const std::int64_t E : {1, 3, 16, 17, 40})
    for (const std::int64_t D : {1, 17, 64, 100}) {
      Router router(D, E, std::min<std::int64_t>(3, E), "sigmoid");
      router.gate_bias = made::Random(72).floats(E);
      router.expert_bias = made::Random(73).floats(E);
      for (const std::int64_t T : {1, 2, 9, 23}) {
        const Floats x = made::Random(74).floats(T * D);
        const plain::Selected want = expected(router, x, T);
        for (const std::string& isa : made::supported_isas()) {
          const made::ForcedIsa forced(isa);
          for (const int threads : made::kThreads)
            expect_same(routed(router, made::values(x, DType::f32), T, threads), want, isa + std::to_string(threads));
        }
      }
    }
}

TEST(Route, NoTokens) {
  for (const int threads : made::kThreads)
    EXPECT_TRUE(routed(Router(8, 4, 2), made::values({}, DType::f32), 0, threads).ids.empty());
}

TEST(Route, HalfPrecisionInputIsConvertedExactly) {
  const Router router(50, 20, 4, "softmax_all");
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const int threads : {1, 5}) {
      const made::Values x = made::values(made::Random(75).floats(7 * 50), dtype);
      expect_same(routed(router, x, 7, threads), expected(router, x.floats(), 7), "");
    }
}

TEST(Route, LogitsAreRoundedAsTheOriginalDoes) {
  Router router(64, 32, 32);
  const Floats x = made::Random(76).floats(5 * 64);
  std::vector<Floats> weights;
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    router.attributes.router_dtype = dtype;
    const plain::Selected s = routed(router, made::values(x, DType::f32), 5);
    expect_same(s, expected(router, x, 5), dtype);
    weights.push_back(s.weights);
  }
  EXPECT_NE(weights[0], weights[1]);
  EXPECT_NE(weights[0], weights[2]);
  EXPECT_NE(weights[1], weights[2]);
}

// The bias is added before the rounding: 1 + 2^-9 is a tie in bf16 and becomes 1.
TEST(Route, TheGateBiasIsAddedBeforeTheRounding) {
  Router router(1, 2, 2);
  router.weight = {1.0f, 1.0f};
  router.gate_bias = {0.0f, 0x1p-9f};
  EXPECT_EQ(routed(router, made::values({1.0f}, DType::f32), 1).ids[0], 1);
  router.attributes.router_dtype = "bfloat16";
  EXPECT_EQ(routed(router, made::values({1.0f}, DType::f32), 1).ids[0], 0);
}

TEST(Route, RouterXReplacesX) {
  const Router router(33, 12, 3);
  const made::Values x = made::values(made::Random(77).floats(4 * 33), DType::bf16);
  const made::Values router_x = made::values(made::Random(78).floats(4 * 33), DType::bf16);
  for (const int threads : {1, 3})
    expect_same(routed(router, x, 4, threads, router_x.data()), routed(router, router_x, 4), "");
}

TEST(Route, GroupsInABatch) {
  Router router(20, 16, 4, "sigmoid");
  router.attributes.n_group = 4;
  router.attributes.topk_group = 2;
  router.attributes.group_score = "top2sum";
  router.attributes.norm_topk = true;
  router.attributes.route_scale = 2.5;
  router.expert_bias = made::Random(79).floats(16, -3.0f, -1.0f);
  const Floats x = made::Random(80).floats(30 * 20);
  for (const int threads : made::kThreads)
    expect_same(routed(router, made::values(x, DType::f32), 30, threads), expected(router, x, 30), "");
}

TEST(Route, ABadTokenLeavesTheOthersAlone) {
  for (const char* score : {"softmax", "softmax_all", "sigmoid"}) {
    const Router router(40, 10, 3, score);
    Floats x = made::Random(81).floats(20 * 40);
    const plain::Selected clean = routed(router, made::values(x, DType::f32), 20);
    for (const float bad : {made::kNaN, made::kInf}) {
      x[11 * 40 + 5] = bad;
      for (const int threads : {1, 3}) {
        plain::Selected s = routed(router, made::values(x, DType::f32), 20, threads);
        for (std::int64_t slot = 11 * 3; slot < 12 * 3; ++slot) {
          EXPECT_GE(s.ids[slot], 0);
          EXPECT_LT(s.ids[slot], 10);
          s.ids[slot] = clean.ids[slot];
          s.weights[slot] = clean.weights[slot];
        }
        expect_same(s, clean, score);
      }
    }
  }
}

}  // namespace
}  // namespace moepack
