#include "selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "made.h"
#include "plain.h"

namespace moepack {
namespace {

using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;
using made::kInf;
using made::kNaN;

const char* const kScores[] = {"softmax", "softmax_all", "sigmoid"};

RoutingAttributes attributes(const char* score) {
  RoutingAttributes r;
  r.score_func = score;
  r.group_score = "top2sum";
  r.router_dtype = "float32";
  return r;
}

plain::Selected select(Floats logits, std::int64_t K, const RoutingAttributes& r, const Floats& bias = {},
                       const std::string& isa = "scalar") {
  const Shape shape{1, 1, 1, static_cast<std::int64_t>(logits.size()), K};
  const gemm::Kernel& kernel = made::kernel_of(isa);
  const Selection selection(shape, r, bias.empty() ? nullptr : bias.data(), kernel);
  std::vector<std::int32_t> keys(2 * logits.size());
  plain::Selected s{Ids(static_cast<std::size_t>(K), -5), Floats(static_cast<std::size_t>(K), -5.0f)};
  selection(logits.data(), keys.data(), s.ids.data(), s.weights.data());
  return s;
}

TEST(Selection, BestFirst) {
  for (const char* score : kScores) EXPECT_EQ(select({0, 3, 1, 2, -1}, 3, attributes(score)).ids, (Ids{1, 3, 2}));
}

TEST(Selection, TiesGoToTheLowestId) {
  for (const char* score : kScores) {
    EXPECT_EQ(select(Floats(20, 0.0f), 4, attributes(score)).ids, (Ids{0, 1, 2, 3})) << score;
    EXPECT_EQ(select({1, 2, 1, 2, 1}, 4, attributes(score)).ids, (Ids{1, 3, 0, 2})) << score;
  }
}

TEST(Selection, MinusZeroIsZero) {
  EXPECT_EQ(select({-0.0f, 0.0f, -0.0f, 0.0f}, 4, attributes("softmax")).ids, (Ids{0, 1, 2, 3}));
  EXPECT_EQ(select({1, 1}, 2, attributes("softmax"), {-1.0f, -1.0f}).ids, (Ids{0, 1}));
}

TEST(Selection, NaNCountsBelowMinusInfinity) {
  EXPECT_EQ(select({kNaN, -kInf, -kNaN, 1, kInf}, 5, attributes("softmax")).ids, (Ids{4, 3, 1, 0, 2}));
  EXPECT_EQ(select({kNaN, -3.4e38f}, 2, attributes("softmax")).ids, (Ids{1, 0}));
  EXPECT_EQ(select(Floats(6, kNaN), 3, attributes("sigmoid")).ids, (Ids{0, 1, 2}));
  EXPECT_EQ(select({kNaN, 2, 5}, 2, attributes("sigmoid")).ids, (Ids{2, 1}));
}

// A NaN that is not among the selected does not reach their weights, but the sum over all experts has it.
TEST(Selection, NaNOfOthersStaysOutOfTheWeights) {
  EXPECT_EQ(select({kNaN, 2, 2}, 2, attributes("softmax")).weights, (Floats{0.5f, 0.5f}));
  EXPECT_EQ(select({kNaN, 0, 0}, 2, attributes("sigmoid")).weights, (Floats{0.5f, 0.5f}));
  EXPECT_TRUE(std::isnan(select({kNaN, 2, 2}, 2, attributes("softmax_all")).weights[0]));
}

TEST(Selection, OneExpert) {
  for (const float logit : {0.0f, -5.0f, 3e38f}) {
    EXPECT_EQ(select({logit}, 1, attributes("softmax")).weights, (Floats{1.0f}));
    EXPECT_EQ(select({logit}, 1, attributes("softmax_all")).weights, (Floats{1.0f}));
    EXPECT_EQ(select({logit}, 1, attributes("sigmoid")).ids, (Ids{0}));
  }
}

TEST(Selection, AllExpertsInTheirOrder) {
  for (const char* score : kScores) {
    const plain::Selected s = select({0.5f, 2, -1, 1}, 4, attributes(score));
    EXPECT_EQ(s.ids, (Ids{1, 3, 0, 2}));
    EXPECT_TRUE(std::is_sorted(s.weights.rbegin(), s.weights.rend()));
  }
}

TEST(Selection, WeightsAreWhatTheFormulasSay) {
  const Floats logits = {0.3f, -1.2f, 2.5f, 0.9f};
  const auto e = [&](int i) { return std::exp(static_cast<double>(logits[i])); };
  const double selected = e(2) + e(3), all = e(0) + e(1) + e(2) + e(3);
  EXPECT_NEAR(select(logits, 2, attributes("softmax")).weights[0], e(2) / selected, 1e-6);
  EXPECT_NEAR(select(logits, 2, attributes("softmax_all")).weights[1], e(3) / all, 1e-6);
  EXPECT_NEAR(select(logits, 2, attributes("sigmoid")).weights[1], 1 / (1 + 1 / e(3)), 1e-6);
}

TEST(Selection, NormMakesTheSumOne) {
  for (const char* score : kScores) {
    RoutingAttributes r = attributes(score);
    r.norm_topk = true;
    const Floats w = select({0.3f, -1.2f, 2.5f, 0.9f, 0.1f}, 3, r).weights;
    EXPECT_NEAR(w[0] + w[1] + w[2], 1.0f, 1e-6) << score;
  }
}

TEST(Selection, NormEpsIsAddedOrClamps) {
  RoutingAttributes r = attributes("sigmoid");  // both scores are 0.5: their sum is 1
  r.norm_topk = true;
  r.norm_eps = 1.0;
  EXPECT_EQ(select({0, 0}, 2, r).weights, (Floats{0.25f, 0.25f}));
  r.norm_clamp = true;
  EXPECT_EQ(select({0, 0}, 2, r).weights, (Floats{0.5f, 0.5f}));
  r.norm_eps = 4.0;
  EXPECT_EQ(select({0, 0}, 2, r).weights, (Floats{0.125f, 0.125f}));
  r.norm_topk = false;
  EXPECT_EQ(select({0, 0}, 2, r).weights, (Floats{0.5f, 0.5f})) << "eps belongs to the norm";
}

TEST(Selection, RouteScaleMultipliesInEveryMode) {
  for (const char* score : kScores)
    for (const bool norm : {false, true}) {
      RoutingAttributes r = attributes(score);
      r.norm_topk = norm;
      Floats expected = select({0.3f, -1.2f, 2.5f, 0.9f}, 3, r).weights;
      for (float& w : expected) w = w * 2.5f;
      r.route_scale = 2.5;
      EXPECT_TRUE(made::same(select({0.3f, -1.2f, 2.5f, 0.9f}, 3, r).weights, expected)) << score << norm;
    }
}

TEST(Selection, BiasSelectsAndDoesNotWeigh) {
  for (const char* score : kScores) {
    const Floats logits = {0, 1, 2, 3};
    const plain::Selected biased = select(logits, 2, attributes(score), {10, 5, 0, 0});
    EXPECT_EQ(biased.ids, (Ids{0, 1}));
    EXPECT_LT(biased.weights[0], biased.weights[1]) << "the weights are those of the scores alone";
    if (score != std::string("softmax")) {
      const plain::Selected all = select(logits, 4, attributes(score));
      EXPECT_EQ(biased.weights, (Floats{all.weights[3], all.weights[2]}));
    }
  }
}

TEST(Selection, GroupsAreScoredByTheirTwoBestOrByTheirBest) {
  RoutingAttributes r = attributes("softmax");
  r.n_group = 3;
  const Floats logits = {9, 0, 0, 5, 5, 1, 4, 4, 4};
  r.group_score = "top2sum";  // 9, 10, 8
  EXPECT_EQ(select(logits, 2, r).ids, (Ids{3, 4}));
  r.group_score = "max";  // 9, 5, 4
  EXPECT_EQ(select(logits, 2, r).ids, (Ids{0, 1}));
  r.topk_group = 2;
  EXPECT_EQ(select(logits, 3, r).ids, (Ids{0, 3, 4}));
  r.topk_group = 3;
  EXPECT_EQ(select(logits, 4, r).ids, (Ids{0, 3, 4, 6})) << "all groups stay";
}

// Systems that put 0 in place of a masked choice let it win against negative ones.
TEST(Selection, AMaskedGroupNeverWinsAgainstNegativeChoices) {
  for (const char* group_score : {"top2sum", "max"}) {
    RoutingAttributes r = attributes("sigmoid");
    r.n_group = 4;
    r.group_score = group_score;
    EXPECT_EQ(select({0, 0, 0, 0, 1, 1, 0, 0}, 2, r, Floats(8, -5.0f)).ids, (Ids{4, 5}));
    EXPECT_EQ(select({-1, -2, -1, -2, -1, -1.5f, -1, -2}, 2, r, Floats(8, -kInf)).ids, (Ids{0, 1}));
  }
}

TEST(Selection, AKeptGroupOfNaNsStillBeatsMaskedGroups) {
  RoutingAttributes r = attributes("softmax");
  r.n_group = 2;
  r.group_score = "max";
  EXPECT_EQ(select({1, kNaN, kNaN, 0, 0, 0}, 3, r).ids, (Ids{0, 1, 2}));
}

TEST(Selection, TiesOfGroupsGoToTheFirst) {
  RoutingAttributes r = attributes("softmax");
  r.n_group = 4;
  r.topk_group = 2;
  EXPECT_EQ(select(Floats(8, 0.0f), 4, r).ids, (Ids{0, 1, 2, 3}));
  EXPECT_EQ(select({0, 0, 1, 1, 0, 0, 1, 1}, 4, r).ids, (Ids{2, 3, 6, 7}));
}

float any_logit(made::Random& random, int kind) {
  static const float special[] = {0.0f, -0.0f, kNaN, kInf, -kInf, 1.0f, -1.0f, 3.4e38f, 1e-45f};
  if (kind == 0) return float_from_bits(random.bits());
  if (kind == 1) return special[random.below(9)];
  return random.uniform(-4.0f, 4.0f);
}

// Whatever the bits of the logits: ids distinct and in range, everything as op.md says, on every instruction set.
TEST(Selection, AnyLogitsInEveryModeOnEveryIsa) {
  made::Random random(5);
  for (int round = 0; round < 4000; ++round) {
    RoutingAttributes r = attributes(kScores[random.below(3)]);
    const std::int64_t n_groups[] = {1, 1, 2, 4};
    r.n_group = n_groups[random.below(4)];
    const std::int64_t E = r.n_group * (2 + random.below(12));
    r.topk_group = 1 + random.below(r.n_group);
    r.group_score = random.below(2) ? "top2sum" : "max";
    r.norm_topk = random.below(2);
    r.norm_clamp = random.below(2);
    r.norm_eps = random.below(2) ? 1e-20 : 0.0;
    r.route_scale = random.below(2) ? 1.0 : 2.5;
    const std::int64_t K = 1 + random.below(E / r.n_group * r.topk_group);
    Floats logits, bias;
    for (std::int64_t e = 0; e < E; ++e) logits.push_back(any_logit(random, round % 3));
    for (std::int64_t e = 0; e < E && round % 2; ++e) bias.push_back(any_logit(random, (round / 2) % 3));

    const plain::Selected expected = plain::select(logits, K, r, bias.empty() ? nullptr : bias.data());
    for (const std::string& isa : made::supported_isas()) {
      const plain::Selected s = select(logits, K, r, bias, isa);
      ASSERT_EQ(s.ids, expected.ids) << isa << " round " << round;
      ASSERT_TRUE(made::same(s.weights, expected.weights)) << isa << " round " << round;
    }
    Ids sorted = expected.ids;
    std::sort(sorted.begin(), sorted.end());
    ASSERT_EQ(std::unique(sorted.begin(), sorted.end()), sorted.end());
    ASSERT_GE(sorted.front(), 0);
    ASSERT_LT(sorted.back(), E);
  }
}

}  // namespace
}  // namespace moepack
