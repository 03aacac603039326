// The layout "torchao": the same codes and scales give the same bits as in moepack's own.
#include "universal.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "made_universal.h"

namespace moepack {
namespace {

std::vector<const Scheme*> int_schemes() {
  std::vector<const Scheme*> result;
  for (const Scheme* scheme : made::all_schemes())
    if (scheme->cell == Cell::int4 || scheme->cell == Cell::int8) result.push_back(scheme);
  return result;
}

TEST(Universal, EqualsThePackedLayoutOnEveryIsa) {
  for (const Scheme* scheme : int_schemes())
    for (const std::int64_t D : {128, 384})
      for (const std::int64_t T : {1, 7, 40}) {
        const made::Twins layers = made::twins(*scheme, D, 256, 3);
        const std::vector<float> x = made::Random(5).floats(T * D);
        const made::Routing r = made::routing(T, 2, 3);
        for (const std::string& isa : made::supported_isas()) {
          const made::ForcedIsa forced(isa);
          const std::vector<float> expected = made::experts(layers.packed, x, r);
          for (const int threads : {1, 3})
            ASSERT_TRUE(made::same(made::experts(layers.universal, x, r, threads), expected))
                << isa << " " << scheme->name << " D=" << D << " T=" << T;
        }
      }
}

// A group of 32 leaves no other choice of dimensions than whole groups.
TEST(Universal, NarrowMatrices) {
  const made::Twins layers = made::twins(*find_scheme("int4-g32"), 32, 32, 2);
  const std::vector<float> x = made::Random(6).floats(5 * 32);
  const made::Routing r = made::routing(5, 2, 2);
  EXPECT_TRUE(made::same(made::experts(layers.universal, x, r), made::experts(layers.packed, x, r)));
}

class UniversalErrors : public testing::Test {
 protected:
  UniversalErrors() : layer_(made::twins(*find_scheme("int4-g32"), 64, 32, 2).universal) {}

  std::string message() {
    made::Values out = made::values(std::vector<float>(64), DType::f32);
    const Status status =
        made::run_experts(layer_, made::values(std::vector<float>(64, 1.0f), DType::f32), {1, 1, {1}, {1.0f}}, 1, out);
    return status.ok() ? "" : status.message();
  }

  made::Layer layer_;
};

TEST_F(UniversalErrors, ForeignBlob) {
  layer_.w13[static_cast<std::size_t>(layer_.bytes13)] ^= 1;
  EXPECT_EQ(message(), "expert 1, w13: not a universal blob of torchao: it begins with 6713");
}

TEST_F(UniversalErrors, OtherBits) {
  layer_.w2[static_cast<std::size_t>(layer_.bytes2) + 8] = 8;
  EXPECT_EQ(message(), "expert 1, w2: field 2 of the universal blob's header is 8; supported for 4-bit codes: 4");
}

TEST_F(UniversalErrors, OnlyExpertsInUseAreLookedAt) {
  layer_.w13[0] ^= 1;
  EXPECT_EQ(message(), "");
}

TEST(UniversalChecks, DimensionsInWholeGroups) {
  const made::Layer layer = made::twins(*find_scheme("int4-g64"), 64, 64, 1).universal;
  Shape shape = layer.shape(1, 1);
  EXPECT_TRUE(check_experts(shape, layer.attributes(), layer.sizes()).ok());
  shape.F = 96;
  const Status status = check_experts(shape, layer.attributes(), layer.sizes());
  EXPECT_TRUE(made::contains(status.message(), "a matrix of 64 x 96 in groups of 64"));
  EXPECT_TRUE(made::contains(status.message(), "pack it in the layout 'moepack'"));
}

TEST(UniversalChecks, BytesOfTheOtherLayout) {
  const made::Twins layers = made::twins(*find_scheme("int8-g32"), 64, 64, 1);
  ExpertSizes sizes = layers.universal.sizes();
  sizes.bytes13 = layers.packed.bytes13;
  EXPECT_FALSE(check_experts(layers.universal.shape(1, 1), layers.universal.attributes(), sizes).ok());
}

}  // namespace
}  // namespace moepack
