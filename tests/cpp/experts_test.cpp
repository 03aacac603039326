#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "grouping.h"
#include "made.h"
#include "plain.h"

namespace moepack {
namespace {

using Floats = std::vector<float>;
using made::contains;
using made::experts;
using made::layer;
using made::Layer;
using made::Routing;
using made::routing;

Floats activations(std::int64_t T, std::int64_t D, std::uint32_t seed = 61) { return made::Random(seed).floats(T * D); }

Floats plain_experts(const Layer& l, const Floats& x, const Routing& r) {
  return plain::experts(l.tensors(), l.shape(r.T, r.K), x, r.ids, r.weights);
}

struct Sizes {
  std::int64_t D, F;
};

// Around panels of 16, groups and activation groups; two of real models' odd sizes among them.
const Sizes kSizes[] = {{16, 16}, {1, 1}, {17, 33}, {100, 129}, {130, 48}, {64, 256}, {40, 704}};

TEST(Experts, EqualsThePageOnEveryIsa) {
  for (const Scheme* scheme : made::all_schemes())
    for (const auto& [D, F] : kSizes)
      for (const bool biases : {false, true}) {
        const Layer l = layer(*scheme, D, F, 3, biases);
        const Floats x = activations(3, D);
        const Routing r = routing(3, 2, 3);
        const Floats expected = plain_experts(l, x, r);
        for (const std::string& isa : made::supported_isas()) {
          const made::ForcedIsa forced(isa);
          ASSERT_TRUE(made::same(experts(l, x, r), expected)) << isa << " " << scheme->name << " " << D << "x" << F;
        }
      }
}

TEST(Experts, AnyThreadsAnyBatchAnyIsa) {
  constexpr std::int64_t T = 37, D = 72, F = 144, E = 6;
  for (const char* scheme : {"int4-g32", "int4-g128", "int8-g64"}) {
    const Layer l = layer(*find_scheme(scheme), D, F, E, true);
    const Floats x = activations(T, D);
    const Routing r = routing(T, 3, E);
    const Floats expected = plain_experts(l, x, r);
    for (const std::string& isa : made::supported_isas()) {
      const made::ForcedIsa forced(isa);
      for (const int threads : made::kThreads) {
        ASSERT_TRUE(made::same(experts(l, x, r, threads), expected)) << isa << " " << scheme << " " << threads;
        for (std::int64_t t = 0; t < T; t += threads == 1 ? 1 : 9)
          ASSERT_TRUE(made::same(experts(l, made::rows_of(x, t, t + 1, D), r.token(t), threads),
                                 made::rows_of(expected, t, t + 1, D)));
      }
    }
  }
}

TEST(Experts, NoTokens) {
  const Layer l = layer(*find_scheme("int4-g32"), 16, 16, 2);
  for (const int threads : made::kThreads) EXPECT_TRUE(experts(l, {}, {0, 2, {}, {}}, threads).empty());
}

TEST(Experts, OneExpert) {
  const Layer l = layer(*find_scheme("int4-g64"), 48, 80, 1, true);
  const Routing r = routing(5, 1, 1);
  EXPECT_TRUE(made::same(experts(l, activations(5, 48), r), plain_experts(l, activations(5, 48), r)));
}

TEST(Experts, EveryTokenToEveryExpert) {
  const Layer l = layer(*find_scheme("int8-g32"), 32, 48, 7);
  Routing r{4, 7, {}, {}};
  for (int i = 0; i < 28; ++i) r.ids.push_back(i % 7), r.weights.push_back(0.1f * static_cast<float>(i % 5));
  EXPECT_TRUE(made::same(experts(l, activations(4, 32), r, 3), plain_experts(l, activations(4, 32), r)));
}

TEST(Experts, SlotsAreSummedInTheirOrder) {
  const Layer l = layer(*find_scheme("int4-g32"), 32, 32, 5);
  const Floats x = activations(1, 32);
  const Routing r{1, 4, {0, 3, 1, 2}, {0.3f, 0.7f, -1.1f, 2.0f}},
      reversed{1, 4, {2, 1, 3, 0}, {2.0f, -1.1f, 0.7f, 0.3f}};
  EXPECT_TRUE(made::same(experts(l, x, r), plain_experts(l, x, r)));
  EXPECT_TRUE(made::same(experts(l, x, reversed), plain_experts(l, x, reversed)));
  EXPECT_FALSE(made::same(experts(l, x, r), experts(l, x, reversed))) << "else this shows nothing";
}

TEST(Experts, ARepeatedIdCountsTwice) {
  const Layer l = layer(*find_scheme("int4-g32"), 48, 32, 4, true);
  const Floats x = activations(1, 48);
  const Routing twice{1, 3, {2, 1, 2}, {0.25f, 0.5f, 0.125f}};
  EXPECT_TRUE(made::same(experts(l, x, twice), plain_experts(l, x, twice)));
  const Floats once = experts(l, x, {1, 1, {2}, {1.0f}}), doubled = experts(l, x, {1, 2, {2, 2}, {1.0f, 1.0f}});
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_EQ(doubled[i], 2 * once[i]);
}

// More rows than a segment has, on every instruction set, cut anywhere among threads.
TEST(Experts, AllTokensToOneExpert) {
  const std::int64_t T = Segment::kRows + 45;
  const Layer l = layer(*find_scheme("int4-g32"), 32, 48, 4, true);
  const Floats x = activations(T, 32);
  Routing r = routing(T, 1, 4);
  std::fill(r.ids.begin(), r.ids.end(), 2);
  const Floats expected = plain_experts(l, x, r);
  for (const std::string& isa : made::supported_isas()) {
    const made::ForcedIsa forced(isa);
    for (const int threads : made::kThreads) ASSERT_TRUE(made::same(experts(l, x, r, threads), expected)) << isa;
  }
}

// Tokens are taken in chunks of 4096 pairs: the first chunks are full, the last is not.
TEST(Experts, SeveralChunksEqualSingleTokens) {
  constexpr std::int64_t K = 8, T = 2 * (4096 / K) + 77;
  const Layer l = layer(*find_scheme("int4-g32"), 24, 32, 16, true);
  const Floats x = activations(T, 24);
  const Routing r = routing(T, K, 16);
  const Floats all = experts(l, x, r, 2);
  for (std::int64_t t = 0; t < T; ++t)
    ASSERT_TRUE(made::same(made::rows_of(all, t, t + 1, 24), experts(l, made::rows_of(x, t, t + 1, 24), r.token(t))))
        << t;
}

TEST(Experts, MoreSlotsThanAChunkHasPairs) {
  const Layer l = layer(*find_scheme("int4-g32"), 16, 16, 3);
  made::Random random(62);
  Routing r{2, 5000, {}, {}};
  for (int i = 0; i < 10000; ++i) r.ids.push_back(random.below(3)), r.weights.push_back(random.uniform(-1.0f, 1.0f));
  const Floats x = activations(2, 16);
  const Floats out = experts(l, x, r, 3);
  EXPECT_TRUE(made::same(made::rows_of(out, 1, 2, 16), experts(l, made::rows_of(x, 1, 2, 16), r.token(1))));
  EXPECT_TRUE(std::isfinite(out[0]));
}

TEST(Experts, NaNAndInfinityOfATokenStayWithIt) {
  const Layer l = layer(*find_scheme("int4-g32"), 160, 48, 4);
  const Routing r = routing(6, 2, 4);
  const Floats clean = activations(6, 160), expected = experts(l, clean, r);
  for (const float bad : {made::kNaN, made::kInf, -made::kInf}) {
    Floats x = clean;
    x[3 * 160 + 150] = bad;
    for (const std::string& isa : made::supported_isas()) {
      const made::ForcedIsa forced(isa);
      const Floats out = experts(l, x, r, 2);
      for (std::int64_t t = 0; t < 6; ++t)
        ASSERT_TRUE(made::same(made::rows_of(out, t, t + 1, 160),
                               t == 3 ? Floats(160, made::kNaN) : made::rows_of(expected, t, t + 1, 160)));
    }
  }
}

TEST(Experts, AnyActivationsAndWeightsOfSlots) {
  const Layer l = layer(*find_scheme("int4-g64"), 130, 40, 4, true);
  made::Random random(63);
  for (int round = 0; round < 20; ++round) {
    Floats x(3 * 130);
    Routing r = routing(3, 2, 4, static_cast<std::uint32_t>(round));
    for (float& v : x)
      v = round % 2 ? std::ldexp(random.uniform(-1, 1), 12 * (round - 10)) : float_from_bits(random.bits());
    for (float& w : r.weights) w = float_from_bits(random.bits());
    const Floats expected = plain_experts(l, x, r);
    for (const std::string& isa : made::supported_isas()) {
      const made::ForcedIsa forced(isa);
      ASSERT_TRUE(made::same(experts(l, x, r), expected)) << isa << " round " << round;
    }
  }
}

TEST(Experts, HalfPrecisionIsConvertedExactlyAndRoundedOnce) {
  for (const auto& [D, F] : kSizes)
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const Layer l = layer(*find_scheme("int4-g32"), D, F, 4, true);
      const made::Values x = made::values(activations(5, D), dtype);
      const Routing r = routing(5, 2, 4);
      const Floats expected = made::values(plain_experts(l, x.floats(), r), dtype).floats();
      for (const std::string& isa : made::supported_isas()) {
        const made::ForcedIsa forced(isa);
        for (const int threads : {1, 3}) {
          made::Values out = x;
          ASSERT_TRUE(made::run_experts(l, x, r, threads, out).ok());
          ASSERT_TRUE(made::same(out.floats(), expected)) << isa << " " << D << "x" << F;
        }
      }
    }
}

class Refused : public testing::Test {
 protected:
  // The message of a call that has to leave the output alone.
  std::string message(const Layer& l, const Routing& r) const {
    made::Values out = made::values(Floats(static_cast<std::size_t>(r.T * l.D), 12345.0f), DType::f32);
    const made::Values before = out;
    const Status status = made::run_experts(l, made::values(activations(r.T, l.D), DType::f32), r, 2, out);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(out.f32, before.f32) << "nothing is written on error";
    return status.message();
  }

  const Layer layer_ = layer(*find_scheme("int4-g32"), 40, 24, 4);
  const Routing routing_{3, 2, {0, 1, 1, 2, 2, 0}, {1, 1, 1, 1, 1, 1}};  // expert 3 is not used
};

TEST_F(Refused, IdsOutOfRange) {
  for (const std::int64_t id : {std::int64_t{-1}, std::int64_t{4}, INT64_MIN, INT64_MAX, std::int64_t{1} << 32}) {
    Routing r = routing_;
    r.ids[5] = id;
    EXPECT_EQ(message(layer_, r), "topk_ids[2, 1] = " + std::to_string(id) + " is outside 0..3");
  }
}

TEST_F(Refused, AnIdOfTheLastChunk) {
  Routing r = routing(5000, 1, 4);
  r.ids.back() = 4;
  EXPECT_TRUE(contains(message(layer_, r), "topk_ids[4999, 0] = 4"));
}

TEST_F(Refused, HeadersOfUsedExperts) {
  for (std::int64_t e = 0; e < 3; ++e) {
    Layer damaged = layer_;
    damaged.w13[e * layer_.bytes13] = 'X';
    EXPECT_TRUE(contains(message(damaged, routing_), "expert " + std::to_string(e) + ", w13: not a moepack blob"));
    damaged = layer_;
    damaged.w2[e * layer_.bytes2 + 4] = 2;
    EXPECT_TRUE(contains(message(damaged, routing_), "expert " + std::to_string(e) + ", w2: packed format version 2"));
  }
}

TEST_F(Refused, BlobsOfAnotherMatrix) {
  Layer other = layer_;
  const auto wrong_order = made::matrix(*layer_.scheme, 48, 40, 1).pack(RowOrder::plain);
  ASSERT_LE(static_cast<std::int64_t>(wrong_order.size()), other.bytes13);
  std::copy(wrong_order.begin(), wrong_order.begin() + 64, other.w13.begin());
  EXPECT_TRUE(contains(message(other, routing_), "expert 0, w13: "));
  other = layer_;
  other.w2[8] = 39;  // as many panels, another shape
  EXPECT_TRUE(contains(message(other, routing_), "expert 0, w2: the blob holds 39 x 24"));
}

TEST_F(Refused, EveryHeaderByteOfEveryExpertInRandomBits) {
  made::Random random(64);
  for (int round = 0; round < 2000; ++round) {
    Layer damaged = layer_;
    std::vector<std::uint8_t>& blobs = round % 2 ? damaged.w13 : damaged.w2;
    const std::int64_t bytes = round % 2 ? layer_.bytes13 : layer_.bytes2;
    blobs[random.below(4) * bytes + random.below(64)] ^= static_cast<std::uint8_t>(1 + random.below(255));
    made::Values out = made::values(activations(3, 40), DType::f32);
    (void)made::run_experts(damaged, out, routing_, 1, out);  // any answer, no crash
  }
}

TEST(Experts, AnUnusedExpertMayBeGarbage) {
  Layer l = layer(*find_scheme("int4-g32"), 40, 24, 4);
  const Routing r{3, 2, {0, 1, 1, 3, 3, 0}, {1, 1, 1, 1, 1, 1}};
  const Floats expected = experts(l, activations(3, 40), r);
  std::fill_n(l.w13.begin() + 2 * l.bytes13, l.bytes13, std::uint8_t{0xff});
  std::fill_n(l.w2.begin() + 2 * l.bytes2, l.bytes2, std::uint8_t{0});
  EXPECT_TRUE(made::same(experts(l, activations(3, 40), r), expected));
}

TEST(Experts, ADamagedPayloadChangesNumbersAlike) {
  made::Random random(65);
  for (const char* scheme : {"int4-g32", "int8-g128"}) {
    Layer l = layer(*find_scheme(scheme), 40, 40, 2);
    for (std::int64_t e = 0; e < 2; ++e) {
      for (std::int64_t i = 64; i < l.bytes13; ++i) l.w13[e * l.bytes13 + i] = static_cast<std::uint8_t>(random.bits());
      for (std::int64_t i = 64; i < l.bytes2; ++i) l.w2[e * l.bytes2 + i] = static_cast<std::uint8_t>(random.bits());
    }
    const Routing r = routing(4, 2, 2);
    const Floats expected = plain_experts(l, activations(4, 40), r);
    for (const std::string& isa : made::supported_isas()) {
      const made::ForcedIsa forced(isa);
      EXPECT_TRUE(made::same(experts(l, activations(4, 40), r), expected)) << isa << " " << scheme;
    }
  }
}

}  // namespace
}  // namespace moepack
