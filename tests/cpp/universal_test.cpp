// The layout "torchao": every instruction set against op.md in plain loops, bit by bit, and layers against moepack's
// own layout of the same codes and scales.
#include "universal.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "made_rows.h"
#include "made_universal.h"

namespace moepack {
namespace {

using Floats = std::vector<float>;
using QuantizedRows = std::vector<plain::Quantized>;

// Any codes, -128 among those of 8 bits, and scales that fp16 does not hold.
made::Matrix fp32_scaled(const Scheme& scheme, std::int64_t rows, std::int64_t cols) {
  made::Matrix m = made::matrix(scheme, rows, cols, 11);
  m.fp32 = made::Random(12).floats(rows * m.groups());
  return m;
}

gemm::Kernel::Gemm gemm_of(const std::string& isa, const Scheme& scheme) {
  using gemm::PanelKind;
  const PanelKind kind = scheme.cell == Cell::int4 ? PanelKind::int4_universal : PanelKind::int8_universal;
  return made::kernel_of(isa).gemm[static_cast<int>(kind)];
}

// All panels: [count, rows of the matrix], with NaNs where nothing is written.
Floats kernel_gemm(const std::string& isa, const made::Matrix& m, const made::Activations& a, const float* bias) {
  const int count = static_cast<int>(a.quantized.size());
  const made::Bytes blob = made::universal(m);
  Floats out(static_cast<std::size_t>(count * m.rows), made::kNaN);
  for (std::int64_t p = 0; p < m.rows / 16; ++p)
    gemm_of(isa, *m.scheme)(universal::panel(*m.scheme, blob.data(), p, m.cols), a.rows, made::all_rows(count).data(),
                            count, bias ? bias + 16 * p : nullptr, out.data() + 16 * p, m.rows);
  return out;
}

Floats plain_gemm(const made::Matrix& m, const QuantizedRows& rows, const float* bias) {
  const plain::Decoded w{m.scheme->cell, m.rows, m.cols, m.scheme->group, 0, m.codes, made::bytes_of(m.fp32)};
  Floats out;
  for (const plain::Quantized& row : rows) {
    const Floats own = plain::gemm(w, row, bias);
    out.insert(out.end(), own.begin(), own.end());
  }
  return out;
}

void expect_all_isas(const made::Matrix& m, const QuantizedRows& rows, const float* bias = nullptr) {
  const Floats expected = plain_gemm(m, rows, bias);
  const made::Activations a(rows, m.cols, m.scheme->group);
  for (const std::string& isa : made::supported_isas())
    ASSERT_TRUE(made::same(kernel_gemm(isa, m, a, bias), expected))
        << isa << " " << m.scheme->name << ", rows " << rows.size() << (bias ? ", bias" : "");
}

// A few rows, which meet one half of a panel after the other, and enough of them for both at once where an instruction
// set does that.
constexpr int kFewAndMany[] = {3, 9};

TEST(UniversalGemm, RowCountsAroundEveryTile) {
  const Floats bias = made::Random(13).floats(32);
  for (const Scheme* scheme : made::integer_schemes()) {
    const made::Matrix m = fp32_scaled(*scheme, 32, 128 + scheme->group);
    for (int count = 0; count <= 20; ++count) {
      const QuantizedRows rows = made::random_rows(count, m.cols, 14);
      expect_all_isas(m, rows);
      expect_all_isas(m, rows, bias.data());
    }
  }
}

// The largest sums there are: what saturates or wraps in 16 bits shows here.
TEST(UniversalGemm, ExtremeCodes) {
  for (const Scheme* scheme : made::integer_schemes())
    for (const int even : {-scheme->code_max - 1, scheme->code_max})
      for (const int odd : {-scheme->code_max - 1, scheme->code_max})
        for (const std::int8_t a_even : {-127, 127})
          for (const std::int8_t a_odd : {-127, 127}) {
            made::Matrix m = fp32_scaled(*scheme, 16, 256);
            plain::Quantized row{std::vector<std::int8_t>(256), {1.0f, 1.0f}};
            for (std::int64_t i = 0; i < 16 * 256; ++i) m.codes[i] = static_cast<std::int8_t>(i % 2 ? odd : even);
            for (int k = 0; k < 256; ++k) row.codes[k] = k % 2 ? a_odd : a_even;
            for (const int count : kFewAndMany) expect_all_isas(m, QuantizedRows(count, row));
          }
}

TEST(UniversalGemm, ScalesOfAnyBits) {
  for (const Scheme* scheme : made::integer_schemes()) {
    made::Matrix m = fp32_scaled(*scheme, 512, 128);
    made::Random random(15);
    for (float& scale : m.fp32) scale = float_from_bits(random.bits());  // infinities and NaNs as well
    m.fp32[0] = made::kInf;
    m.fp32[1] = made::kNaN;
    m.fp32[2] = 0x1p-149f;
    for (const int count : kFewAndMany) expect_all_isas(m, made::random_rows(count, 128, 16));
  }
}

TEST(UniversalGemm, ANaNRowStaysAlone) {
  for (const Scheme* scheme : made::integer_schemes())
    for (const int count : kFewAndMany) {
      QuantizedRows rows = made::random_rows(count, 256, 17);
      rows[1] = plain::quantize(Floats(256, made::kInf));
      expect_all_isas(fp32_scaled(*scheme, 16, 256), rows);
    }
}

// Only the panel's 16 columns of each row are written.
TEST(UniversalGemm, StaysWithinItsColumns) {
  for (const Scheme* scheme : made::integer_schemes())
    for (const int count : kFewAndMany) {
      const made::Matrix m = fp32_scaled(*scheme, 16, 128);
      const made::Bytes blob = made::universal(m);
      const made::Activations a(made::random_rows(count, 128, 18), 128, scheme->group);
      for (const std::string& isa : made::supported_isas()) {
        Floats out(static_cast<std::size_t>((count + 2) * 50), 77.0f);
        gemm_of(isa, *scheme)(universal::panel(*scheme, blob.data(), 0, 128), a.rows, made::all_rows(count).data(),
                              count, nullptr, out.data() + 50 + 17, 50);
        for (int r = 0; r < count + 2; ++r)
          for (int c = 0; c < 50; ++c) {
            const bool written = r >= 1 && r <= count && c >= 17 && c < 33;
            ASSERT_EQ(out[r * 50 + c] == 77.0f, !written) << isa << " " << scheme->name << " " << r << " " << c;
          }
      }
    }
}

TEST(Universal, EqualsThePackedLayoutOnEveryIsa) {
  for (const Scheme* scheme : made::integer_schemes())
    for (const std::int64_t D : {128, 384})
      for (const std::int64_t T : {1, 7, 40}) {
        const made::Twins layers = made::twins(*scheme, D, 256, 3);
        const Floats x = made::Random(5).floats(T * D);
        const made::Routing r = made::routing(T, 2, 3);
        for (const std::string& isa : made::supported_isas()) {
          const made::ForcedIsa forced(isa);
          const Floats expected = made::experts(layers.packed, x, r);
          for (const int threads : {1, 3})
            ASSERT_TRUE(made::same(made::experts(layers.universal, x, r, threads), expected))
                << isa << " " << scheme->name << " D=" << D << " T=" << T;
        }
      }
}

// A group of 32 leaves no other choice of dimensions than whole groups.
TEST(Universal, NarrowMatrices) {
  const made::Twins layers = made::twins(*find_scheme("int4-g32"), 32, 32, 2);
  const Floats x = made::Random(6).floats(5 * 32);
  const made::Routing r = made::routing(5, 2, 2);
  EXPECT_TRUE(made::same(made::experts(layers.universal, x, r), made::experts(layers.packed, x, r)));
}

TEST(Universal, BiasesOfBothHalvesOfEveryPanel) {
  made::Twins layers = made::twins(*find_scheme("int8-g32"), 64, 160, 3);
  layers.packed.bias13 = layers.universal.bias13 = made::Random(7).floats(3 * 2 * 160);
  layers.packed.bias2 = layers.universal.bias2 = made::Random(8).floats(3 * 64);
  for (const std::int64_t T : {1, 40}) {
    const Floats x = made::Random(9).floats(T * 64);
    const made::Routing r = made::routing(T, 2, 3);
    const Floats expected = plain::experts(layers.packed.tensors(), layers.packed.shape(T, 2), x, r.ids, r.weights);
    for (const std::string& isa : made::supported_isas()) {
      const made::ForcedIsa forced(isa);
      EXPECT_TRUE(made::same(made::experts(layers.universal, x, r), expected)) << isa << " T=" << T;
    }
  }
}

class UniversalErrors : public testing::Test {
 protected:
  UniversalErrors() : layer_(made::twins(*find_scheme("int4-g32"), 64, 32, 2).universal) {}

  std::string message() {
    made::Values out = made::values(Floats(64), DType::f32);
    const Status status =
        made::run_experts(layer_, made::values(Floats(64, 1.0f), DType::f32), {1, 1, {1}, {1.0f}}, 1, out);
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
