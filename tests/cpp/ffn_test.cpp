// The whole block is the router, then the experts.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "made.h"
#include "plain.h"

namespace moepack {
namespace {

using Floats = std::vector<float>;

class Ffn : public testing::Test {
 protected:
  static constexpr std::int64_t D = 72, F = 80, E = 6, K = 2;

  Ffn() {
    routing_.score_func = "sigmoid";
    routing_.group_score = "max";
    routing_.router_dtype = "float32";
    routing_.norm_topk = true;
    routing_.route_scale = 1.5;
  }

  Status run(const made::Layer& layer, const made::Values& x, std::int64_t T, int threads, made::Values& out,
             const void* router_x = nullptr) const {
    const Shape shape = layer.shape(T, K);
    const ExpertAttributes attributes = layer.attributes();
    EXPECT_TRUE(check_routing(shape, routing_).ok());
    EXPECT_TRUE(check_experts(shape, attributes, layer.sizes()).ok());
    made::Workspace workspace(ffn_workspace_bytes(shape, attributes, threads));
    return quantized_moe_ffn(shape, routing_, {router_x, gate_.data(), gate_bias_.data(), expert_bias_.data()},
                             attributes, layer.tensors(), x.data(), x.dtype, out.data(), workspace.base(),
                             made::threads(threads));
  }

  Floats output(const made::Values& x, std::int64_t T, int threads, const void* router_x = nullptr) const {
    made::Values out = made::values(Floats(static_cast<std::size_t>(T * D), 12345.0f), x.dtype);
    const Status status = run(layer_, x, T, threads, out, router_x);
    EXPECT_TRUE(status.ok()) << status.message();
    return out.floats();
  }

  // By op.md, for fp32.
  Floats expected(const Floats& x, std::int64_t T) const {
    made::Routing r{T, K, {}, {}};
    for (std::int64_t t = 0; t < T; ++t) {
      Floats logits;
      for (std::int64_t e = 0; e < E; ++e)
        logits.push_back(plain::router_dot(x.data() + t * D, gate_.data() + e * D, D) + gate_bias_[e]);
      const plain::Selected s = plain::select(logits, K, routing_, expert_bias_.data());
      r.ids.insert(r.ids.end(), s.ids.begin(), s.ids.end());
      r.weights.insert(r.weights.end(), s.weights.begin(), s.weights.end());
    }
    return plain::experts(layer_.tensors(), layer_.shape(T, K), x, r.ids, r.weights);
  }

  const made::Layer layer_ = made::layer(*find_scheme("int4-g32"), D, F, E, true);
  const Floats gate_ = made::Random(91).floats(E * D);
  const Floats gate_bias_ = made::Random(92).floats(E);
  const Floats expert_bias_ = made::Random(93).floats(E);
  RoutingAttributes routing_;
};

TEST_F(Ffn, EqualsThePageOnAnyIsaWithAnyThreadsInAnyBatch) {
  constexpr std::int64_t T = 21;
  const Floats x = made::Random(94).floats(T * D), want = expected(x, T);
  for (const std::string& isa : made::supported_isas()) {
    const made::ForcedIsa forced(isa);
    for (const int threads : made::kThreads) {
      ASSERT_TRUE(made::same(output(made::values(x, DType::f32), T, threads), want)) << isa << " " << threads;
      for (std::int64_t t = 0; t < T; t += 4) {
        const made::Values token = made::values(made::rows_of(x, t, t + 1, D), DType::f32);
        ASSERT_TRUE(made::same(output(token, 1, threads), made::rows_of(want, t, t + 1, D))) << isa << " " << threads;
      }
    }
  }
}

TEST_F(Ffn, HalfPrecision) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const made::Values x = made::values(made::Random(95).floats(5 * D), dtype);
    const Floats want = made::values(expected(x.floats(), 5), dtype).floats();
    for (const int threads : {1, 3}) EXPECT_TRUE(made::same(output(x, 5, threads), want));
  }
}

TEST_F(Ffn, NoTokens) {
  for (const int threads : made::kThreads) EXPECT_TRUE(output(made::values({}, DType::f32), 0, threads).empty());
}

TEST_F(Ffn, RouterXRoutesAndXIsTransformed) {
  const Floats x = made::Random(96).floats(3 * D), router_x = made::Random(97).floats(3 * D);
  const Floats own = output(made::values(x, DType::f32), 3, 1);
  EXPECT_TRUE(made::same(output(made::values(x, DType::f32), 3, 1, x.data()), own));
  EXPECT_FALSE(made::same(output(made::values(x, DType::f32), 3, 1, router_x.data()), own));
}

TEST_F(Ffn, NaNRoutesSomewhereAndStaysInItsRow) {
  Floats x = made::Random(98).floats(4 * D);
  const Floats clean = output(made::values(x, DType::f32), 4, 1);
  x[2 * D + 1] = made::kNaN;
  const Floats out = output(made::values(x, DType::f32), 4, 2);
  for (std::int64_t t = 0; t < 4; ++t)
    EXPECT_TRUE(made::same(made::rows_of(out, t, t + 1, D),
                           t == 2 ? Floats(D, made::kNaN) : made::rows_of(clean, t, t + 1, D)));
}

TEST_F(Ffn, AForeignBlobIsRefusedAndNothingIsWritten) {
  made::Layer damaged = layer_;
  for (std::int64_t e = 0; e < E; ++e) damaged.w2[e * layer_.bytes2] = 0;
  const made::Values x = made::values(made::Random(99).floats(2 * D), DType::f32);
  made::Values out = made::values(Floats(2 * D, 12345.0f), DType::f32);
  const Status status = run(damaged, x, 2, 2, out);
  EXPECT_TRUE(made::contains(status.message(), "w2: not a moepack blob"));
  EXPECT_EQ(out.f32, Floats(2 * D, 12345.0f));
}

}  // namespace
}  // namespace moepack
