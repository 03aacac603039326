// What the op refuses before it looks at any content, and how it says so.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "made.h"

namespace moepack {
namespace {

using made::contains;

class CheckExperts : public testing::Test {
 protected:
  std::string message() const { return check_experts(shape_, attributes_, sizes_).message(); }

  const made::Layer layer_ = made::layer(*find_scheme("int4-g32"), 33, 17, 4, true);
  Shape shape_ = layer_.shape(3, 2);
  ExpertAttributes attributes_ = layer_.attributes();
  ExpertSizes sizes_ = layer_.sizes();
};

TEST_F(CheckExperts, AcceptsWhatFits) {
  EXPECT_EQ(message(), "");
  sizes_.bias13 = 4 * 2 * 17;
  sizes_.bias2 = 4 * 33;
  EXPECT_EQ(message(), "");
  shape_.T = 0;
  EXPECT_EQ(message(), "");
  shape_.K = 9;
  EXPECT_EQ(message(), "") << "ids may repeat, so more slots than experts are fine";
}

TEST_F(CheckExperts, EveryScheme) {
  for (const Scheme* scheme : made::all_schemes()) {
    const made::Layer layer = made::layer(*scheme, 33, 17, 1);
    EXPECT_EQ(std::string(check_experts(layer.shape(1, 1), layer.attributes(), layer.sizes()).message()), "");
  }
}

TEST_F(CheckExperts, UnknownNames) {
  attributes_.scheme = "int3-g32";
  EXPECT_EQ(message(), std::string("scheme 'int3-g32' is not supported; supported: ") + scheme_names());
  attributes_.scheme = "";
  EXPECT_TRUE(contains(message(), "scheme ''"));
  attributes_ = layer_.attributes();
  attributes_.layout = "gguf";
  EXPECT_EQ(message(), "layout 'gguf' is not supported; supported: moepack, torchao");
  attributes_ = layer_.attributes();
  attributes_.activation = "gelu";
  EXPECT_EQ(message(), "activation 'gelu' is not supported; supported: silu, gelu_tanh, swiglu_oai, relu, relu2");
}

TEST_F(CheckExperts, NumbersThatDoNotGoTogether) {
  const std::pair<const char*, std::function<void(ExpertAttributes&)>> changes[] = {
      {"act_limit", [](auto& a) { a.act_limit = made::kNaN; }},
      {"act_limit", [](auto& a) { a.act_limit = -7.0; }},
      {"act_limit", [](auto& a) { a.act_limit = 1e39; }},
      {"act_limit", [](auto& a) { a.act_limit = 1e-60; }},
      {"act_alpha", [](auto& a) { a.act_alpha = 1.702; }},
      {"act_alpha", [](auto& a) { a.act_alpha = made::kNaN; }},
      {"gate_softcap",
       [](auto& a) {
         a.activation = "gelu_tanh";
         a.gate_softcap = 30.0;
       }},
      {"act_limit",
       [](auto& a) {
         a.activation = "relu2";
         a.act_limit = 7.0;
       }},
      {"up_softcap", [](auto& a) { a.up_softcap = -1.0; }},
      {"limit_after_act", [](auto& a) { a.limit_after_act = true; }},
  };
  for (const auto& [name, change] : changes) {
    attributes_ = layer_.attributes();
    change(attributes_);
    EXPECT_TRUE(contains(message(), name));
  }
  attributes_ = layer_.attributes();
  attributes_.weight_on_input = true;
  EXPECT_EQ(message(),
            sizes_.bias13 < 0 ? "" : "weight_on_input is not supported together with bias13; supported: one of them");
}

TEST_F(CheckExperts, ExpertsWithoutAGateHaveHalfTheRows) {
  attributes_.activation = "relu";
  EXPECT_TRUE(contains(message(), "packed_w13 has"));
  sizes_.bytes13 = packed_bytes(*find_scheme(attributes_.scheme), shape_.F, shape_.D, RowOrder::plain);
  sizes_.bias13 = -1;
  EXPECT_EQ(message(), "");
}

TEST_F(CheckExperts, Shapes) {
  const std::pair<const char*, std::function<void(Shape&)>> changes[] = {
      {"-1 tokens", [](Shape& s) { s.T = -1; }},
      {"model width 0", [](Shape& s) { s.D = 0; }},
      {"hidden_dim -1", [](Shape& s) { s.F = -1; }},
      {"0 experts", [](Shape& s) { s.E = 0; }},
      {"below 2^29", [](Shape& s) { s.D = std::int64_t{1} << 29; }},
      {"below 2^29", [](Shape& s) { s.F = INT64_MAX; }},
      {"below 2^29", [](Shape& s) { s.E = INT64_MAX / 2; }},
      {"0 activated experts", [](Shape& s) { s.K = 0; }},
      {"-3 activated experts", [](Shape& s) { s.K = -3; }},
      {"fewer than 2^29", [](Shape& s) { s.K = std::int64_t{1} << 29; }},  // sizes of the workspace would overflow
  };
  for (const auto& [text, change] : changes) {
    shape_ = layer_.shape(3, 2);
    change(shape_);
    EXPECT_TRUE(contains(message(), text));
  }
}

TEST_F(CheckExperts, TensorsThatContradictTheShape) {
  const std::pair<const char*, std::function<void(ExpertSizes&)>> changes[] = {
      {"packed_w13 holds 5 experts, the other tensors 4", [](ExpertSizes& s) { s.experts13 = 5; }},
      {"packed_w2 holds 3 experts", [](ExpertSizes& s) { s.experts2 = 3; }},
      {"packed_w13 has 2367 bytes per expert; this scheme and these dimensions need 2368",
       [](ExpertSizes& s) { s.bytes13 -= 1; }},
      {"packed_w2 has 64 bytes per expert", [](ExpertSizes& s) { s.bytes2 = 64; }},
      {"bias13 has 17 elements, not 136", [](ExpertSizes& s) { s.bias13 = 17; }},
      {"bias2 has 0 elements, not 132", [](ExpertSizes& s) { s.bias2 = 0; }},
  };
  for (const auto& [text, change] : changes) {
    sizes_ = layer_.sizes();
    change(sizes_);
    EXPECT_TRUE(contains(message(), text));
  }
}

class CheckRouting : public testing::Test {
 protected:
  CheckRouting() {
    routing_.score_func = "softmax";
    routing_.group_score = "top2sum";
    routing_.router_dtype = "float32";
  }
  std::string message() const { return check_routing(shape_, routing_).message(); }

  Shape shape_{3, 33, 17, 8, 2};
  RoutingAttributes routing_;
};

TEST_F(CheckRouting, AcceptsWhatIsSupported) {
  for (const char* score : {"softmax", "softmax_all", "sigmoid"})
    for (const char* group_score : {"top2sum", "max"})
      for (const char* dtype : {"float32", "bfloat16", "float16"}) {
        routing_.score_func = score;
        routing_.group_score = group_score;
        routing_.router_dtype = dtype;
        EXPECT_EQ(message(), "");
      }
  routing_.n_group = 4;
  routing_.topk_group = 1;
  EXPECT_EQ(message(), "");
  routing_.n_group = 8;
  routing_.topk_group = 2;
  routing_.group_score = "max";
  EXPECT_EQ(message(), "") << "max needs no second expert in a group";
  shape_.K = 8;
  routing_.n_group = routing_.topk_group = 1;
  EXPECT_EQ(message(), "");
}

TEST_F(CheckRouting, Refusals) {
  using Change = std::function<void(Shape&, RoutingAttributes&)>;
  const std::pair<const char*, Change> changes[] = {
      {"9 activated experts of 8", [](Shape& s, auto&) { s.K = 9; }},
      {"score_func 'tanh' is not supported; supported: softmax, softmax_all, sigmoid",
       [](Shape&, auto& r) { r.score_func = "tanh"; }},
      {"group_score '' is not supported; supported: top2sum, max", [](Shape&, auto& r) { r.group_score = ""; }},
      {"router_dtype 'float64' is not supported; supported: float32, bfloat16, float16",
       [](Shape&, auto& r) { r.router_dtype = "float64"; }},
      {"norm_eps", [](Shape&, auto& r) { r.norm_eps = -1e-9; }},
      {"norm_eps", [](Shape&, auto& r) { r.norm_eps = made::kNaN; }},
      {"norm_eps", [](Shape&, auto& r) { r.norm_eps = 1e300; }},
      {"route_scale", [](Shape&, auto& r) { r.route_scale = made::kInf; }},
      {"route_scale", [](Shape&, auto& r) { r.route_scale = -1e300; }},
      {"n_group 3 has to divide 8 experts", [](Shape&, auto& r) { r.n_group = 3; }},
      {"n_group 0", [](Shape&, auto& r) { r.n_group = 0; }},
      {"n_group 16", [](Shape&, auto& r) { r.n_group = 16; }},
      {"topk_group 0 is outside 1..n_group = 1", [](Shape&, auto& r) { r.topk_group = 0; }},
      {"topk_group 2 is outside 1..n_group = 1", [](Shape&, auto& r) { r.topk_group = 2; }},
      {"top2sum needs groups of at least 2",
       [](Shape&, auto& r) {
         r.n_group = 8;
         r.topk_group = 4;
       }},
      {"1 groups of 2 experts are too few for 3",
       [](Shape& s, auto& r) {
         r.n_group = 4;
         s.K = 3;
       }},
  };
  for (const auto& [text, change] : changes) {
    Shape shape = shape_;
    RoutingAttributes routing = routing_;
    change(shape, routing);
    EXPECT_TRUE(contains(check_routing(shape, routing).message(), text));
  }
}

}  // namespace
}  // namespace moepack
