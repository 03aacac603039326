// The layout "torchao": the same codes and scales give the same bits as in moepack's own.
#include "universal.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "made.h"

namespace moepack {
namespace {

using Bytes = std::vector<std::uint8_t>;

std::vector<const Scheme*> int_schemes() {
  std::vector<const Scheme*> result;
  for (const Scheme* scheme : made::all_schemes())
    if (scheme->cell == Cell::int4 || scheme->cell == Cell::int8) result.push_back(scheme);
  return result;
}

template <class T>
void append(Bytes& bytes, T value) {
  const auto* p = reinterpret_cast<const std::uint8_t*>(&value);
  bytes.insert(bytes.end(), p, p + sizeof value);
}

// The codes of 8 rows and 16 k, in two halves of k, row after row.
std::vector<int> chunk(const made::Matrix& m, std::int64_t row, std::int64_t k) {
  std::vector<int> values;
  for (int half = 0; half < 2; ++half)
    for (int r = 0; r < 8; ++r)
      for (int i = 0; i < 8; ++i) values.push_back(m.codes[(row + r) * m.cols + k + 8 * half + i]);
  return values;
}

// Scales are those of the matrix, without its exponent.
Bytes universal(const made::Matrix& m) {
  Bytes blob;
  const bool int4 = m.scheme->cell == Cell::int4;
  for (const std::int32_t field : {6712, 1, int4 ? 4 : 8, 0, 0, 8, 16, 2, 0, 0, 0, 0, 0, 0, 0, 0}) append(blob, field);
  for (std::int64_t row = 0; row < m.rows; row += 8)
    for (std::int64_t g = 0; g < m.groups(); ++g) {
      for (std::int64_t k = g * m.scheme->group; k < (g + 1) * m.scheme->group; k += 16) {
        const std::vector<int> values = chunk(m, row, k);
        for (int run = 0; int4 && run < 128; run += 32)
          for (int i = run; i < run + 16; ++i)
            append(blob, static_cast<std::uint8_t>((values[i] + 8) | (values[i + 16] + 8) << 4));
        for (int i = 0; !int4 && i < 128; ++i) append(blob, static_cast<std::int8_t>(values[i]));
      }
      for (int r = 0; r < 8; ++r) append(blob, float_from_half(m.scales[(row + r) * m.groups() + g]));
      for (int r = 0; r < 8; ++r) append(blob, 0x7fffffff);  // sums of codes: not looked at
    }
  return blob;
}

struct Twins {
  made::Layer packed, universal;
};

Twins twins(const Scheme& scheme, std::int64_t D, std::int64_t F, std::int64_t E, bool gated = true) {
  made::Layer packed{D, F, E, &scheme, 0, 0, {}, {}, {}, {}};
  made::Layer other = packed;
  other.layout = "torchao";
  for (std::int64_t e = 0; e < E; ++e) {
    made::Matrix w13 = made::matrix(scheme, gated ? 2 * F : F, D, static_cast<std::uint32_t>(3 + e));
    made::Matrix w2 = made::matrix(scheme, D, F, static_cast<std::uint32_t>(300 + e));
    w13.exponent = w2.exponent = 0;
    for (std::uint16_t& scale : w13.scales) scale = half_from_float(float_from_half(scale) * 0x1p-7f);
    const auto add = [](Bytes& to, const Bytes& blob) { to.insert(to.end(), blob.begin(), blob.end()); };
    add(packed.w13, w13.pack(gated ? RowOrder::gate_up : RowOrder::plain));
    add(packed.w2, w2.pack(RowOrder::plain));
    add(other.w13, universal(w13));
    add(other.w2, universal(w2));
  }
  for (made::Layer* layer : {&packed, &other}) {
    layer->bytes13 = static_cast<std::int64_t>(layer->w13.size()) / E;
    layer->bytes2 = static_cast<std::int64_t>(layer->w2.size()) / E;
  }
  return {packed, other};
}

TEST(Universal, EqualsThePackedLayoutOnEveryIsa) {
  for (const Scheme* scheme : int_schemes())
    for (const std::int64_t D : {128, 384})
      for (const std::int64_t T : {1, 7, 40}) {
        const Twins layers = twins(*scheme, D, 256, 3);
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
  const Twins layers = twins(*find_scheme("int4-g32"), 32, 32, 2);
  const std::vector<float> x = made::Random(6).floats(5 * 32);
  const made::Routing r = made::routing(5, 2, 2);
  EXPECT_TRUE(made::same(made::experts(layers.universal, x, r), made::experts(layers.packed, x, r)));
}

class UniversalErrors : public testing::Test {
 protected:
  UniversalErrors() : layer_(twins(*find_scheme("int4-g32"), 64, 32, 2).universal) {}

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
  const made::Layer layer = twins(*find_scheme("int4-g64"), 64, 64, 1).universal;
  Shape shape = layer.shape(1, 1);
  EXPECT_TRUE(check_experts(shape, layer.attributes(), layer.sizes()).ok());
  shape.F = 96;
  const Status status = check_experts(shape, layer.attributes(), layer.sizes());
  EXPECT_TRUE(made::contains(status.message(), "a matrix of 64 x 96 in groups of 64"));
  EXPECT_TRUE(made::contains(status.message(), "pack it in the layout 'moepack'"));
}

TEST(UniversalChecks, BytesOfTheOtherLayout) {
  const Twins layers = twins(*find_scheme("int8-g32"), 64, 64, 1);
  ExpertSizes sizes = layers.universal.sizes();
  sizes.bytes13 = layers.packed.bytes13;
  EXPECT_FALSE(check_experts(layers.universal.shape(1, 1), layers.universal.attributes(), sizes).ok());
}

}  // namespace
}  // namespace moepack
