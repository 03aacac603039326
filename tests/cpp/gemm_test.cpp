// The tiles: every instruction set against op.md in plain loops, bit by bit.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "made_rows.h"

namespace moepack {
namespace {

using made::Activations;
using made::all_rows;
using made::random_rows;
using Floats = std::vector<float>;

// A kernel on all 16-column panels of a plain matrix: [count, rows padded to panels], with NaNs where nothing is
// written.
Floats kernel_gemm(const std::string& isa, const made::Matrix& m, const Activations& a,
                   const std::vector<std::int32_t>& index, const float* bias) {
  const gemm::Kernel& kernel = made::kernel_of(isa);
  const gemm::PanelKind kinds[] = {gemm::PanelKind::int4, gemm::PanelKind::int8, gemm::PanelKind::mxfp4};
  const int cell = static_cast<int>(m.scheme->cell) - 1;
  const auto gemm = kernel.gemm[static_cast<int>(kinds[cell])];
  const std::vector<std::uint8_t> blob = m.pack(RowOrder::plain);
  const std::int64_t width = round_up(m.rows, 16);
  Floats out(index.size() * static_cast<std::size_t>(width), made::kNaN);
  for (std::int64_t p = 0; p < width / 16; ++p)
    gemm({blob.data() + 64 + p * panel_bytes(*m.scheme, m.cols), static_cast<int>(m.groups()), m.scheme->group,
          std::ldexp(1.0f, m.exponent - (m.scheme->cell == Cell::mxfp4 ? 1 : 0))},
         a.rows, index.data(), static_cast<int>(index.size()), bias ? bias + 16 * p : nullptr, out.data() + 16 * p,
         width);
  return out;
}

Floats plain_gemm(const made::Matrix& m, const Activations& a, const std::vector<std::int32_t>& index,
                  const float* bias) {
  const std::int64_t width = round_up(m.rows, 16);
  const std::vector<std::uint8_t> blob = m.pack(RowOrder::plain);
  const plain::Decoded decoded = plain::decode(blob.data());
  Floats out;
  for (const std::int32_t row : index) {
    Floats own = plain::gemm(decoded, a.quantized[row], bias);
    for (std::int64_t n = m.rows; n < width; ++n) own.push_back(bias ? 0.0f + bias[n] : 0.0f);  // padded columns
    out.insert(out.end(), own.begin(), own.end());
  }
  return out;
}

void expect_all_isas(const made::Matrix& m, const Activations& a, const std::vector<std::int32_t>& index,
                     const float* bias = nullptr) {
  const Floats expected = plain_gemm(m, a, index, bias);
  for (const std::string& isa : made::supported_isas())
    ASSERT_TRUE(made::same(kernel_gemm(isa, m, a, index, bias), expected))
        << isa << " " << m.scheme->name << " " << m.rows << "x" << m.cols << ", rows " << index.size();
}

TEST(Gemm, ShapesWithTails) {
  for (const Scheme* scheme : made::quantizing_schemes())
    for (const std::int64_t cols : {1, 31, 32, 33, 64, 127, 128, 129, 160, 300, 512})
      for (const std::int64_t rows : {1, 17}) {
        const made::Matrix m = made::matrix(*scheme, rows, cols, 21);
        expect_all_isas(m, Activations(random_rows(3, cols, 22), cols, scheme->group), all_rows(3));
      }
}

TEST(Gemm, RowCountsAroundEveryTile) {
  for (const Scheme* scheme : made::quantizing_schemes())
    for (int count = 0; count <= 20; ++count) {
      const made::Matrix m = made::matrix(*scheme, 16, 200, 23);
      expect_all_isas(m, Activations(random_rows(count, 200, 24), 200, scheme->group), all_rows(count));
    }
}

TEST(Gemm, Bias) {
  const Floats bias = made::Random(25).floats(48);
  for (const Scheme* scheme : made::quantizing_schemes()) {
    const made::Matrix m = made::matrix(*scheme, 48, 96, 26);
    expect_all_isas(m, Activations(random_rows(9, 96, 27), 96, scheme->group), all_rows(9), bias.data());
  }
}

TEST(Gemm, RowsInAnyOrderAndRepeated) {
  for (const Scheme* scheme : made::quantizing_schemes()) {
    const made::Matrix m = made::matrix(*scheme, 16, 130, 28);
    expect_all_isas(m, Activations(random_rows(7, 130, 29), 130, scheme->group), {6, 0, 3, 3, 3, 5, 1, 0, 2, 6, 4});
  }
}

TEST(Gemm, Exponents) {
  for (const int exponent : {-126, -40, 0, 40, 127}) {
    made::Matrix m = made::matrix(*find_scheme("int4-g32"), 16, 64, 30);
    m.exponent = exponent;
    expect_all_isas(m, Activations(random_rows(5, 64, 31), 64, 32), all_rows(5));
  }
}

TEST(Gemm, EveryFiniteScale) {
  made::Matrix m = made::matrix(*find_scheme("int8-g32"), 16, 32, 32);
  const Activations a(random_rows(1, 32, 33), 32, 32);
  for (std::uint32_t h = 0; h < 0x10000; h += 13) {
    std::fill(m.scales.begin(), m.scales.end(), static_cast<std::uint16_t>(h));  // infinities and NaNs as well
    expect_all_isas(m, a, {0});
  }
}

// The codes of the least and of the largest value.
std::pair<int, int> extremes(const Scheme& scheme) {
  if (scheme.cell == Cell::mxfp4) return {15, 7};
  return {-scheme.code_max - 1, scheme.code_max};
}

// The largest sums there are: what saturates or wraps in 16 bits shows here.
TEST(Gemm, ExtremeCodes) {
  for (const Scheme* scheme : made::quantizing_schemes()) {
    const auto [least, most] = extremes(*scheme);
    for (const int even : {least, most})
      for (const int odd : {least, most})
        for (const int a_even : {-127, 127})
          for (const int a_odd : {-127, 127}) {
            made::Matrix m = made::matrix(*scheme, 16, 256, 34);
            plain::Quantized q{std::vector<std::int8_t>(256), {1.0f, 1.0f}};
            for (std::int64_t i = 0; i < 16 * 256; ++i) m.codes[i] = static_cast<std::int8_t>(i % 2 ? odd : even);
            for (int k = 0; k < 256; ++k) q.codes[k] = static_cast<std::int8_t>(k % 2 ? a_odd : a_even);
            expect_all_isas(m, Activations(std::vector<plain::Quantized>(9, q), 256, scheme->group), all_rows(9));
          }
  }
}

TEST(Gemm, RandomExtremeCodes) {
  made::Random random(35);
  for (const Scheme* scheme : made::quantizing_schemes())
    for (int round = 0; round < 20; ++round) {
      made::Matrix m = made::matrix(*scheme, 16, 128, 36);
      const auto [least, most] = extremes(*scheme);
      const int codes[] = {least, least ^ 1, most, 0};
      for (std::int8_t& code : m.codes) code = static_cast<std::int8_t>(codes[random.below(4)]);
      std::vector<plain::Quantized> rows(9, {std::vector<std::int8_t>(128), {0.5f}});
      for (plain::Quantized& q : rows)
        for (std::int8_t& code : q.codes) code = static_cast<std::int8_t>(random.below(2) ? 127 : -127);
      expect_all_isas(m, Activations(rows, 128, scheme->group), all_rows(9));
    }
}

TEST(Gemm, ANaNRowStaysAlone) {
  for (const Scheme* scheme : made::quantizing_schemes()) {
    const made::Matrix m = made::matrix(*scheme, 16, 200, 37);
    std::vector<plain::Quantized> rows = random_rows(9, 200, 38);
    const Floats clean = plain_gemm(m, Activations(rows, 200, scheme->group), all_rows(9), nullptr);
    Floats bad(200, 1.0f);
    bad[150] = made::kInf;
    rows[4] = plain::quantize(bad);
    const Activations a(rows, 200, scheme->group);
    expect_all_isas(m, a, all_rows(9));
    for (const std::string& isa : made::supported_isas()) {
      const Floats out = kernel_gemm(isa, m, a, all_rows(9), nullptr);
      for (int r = 0; r < 9; ++r) {
        const Floats expected = r == 4 ? Floats(16, made::kNaN) : made::rows_of(clean, r, r + 1, 16);
        EXPECT_TRUE(made::same(made::rows_of(out, r, r + 1, 16), expected)) << isa << " row " << r;
      }
    }
  }
}

// Only the panel's 16 columns of each row are written.
TEST(Gemm, StaysWithinItsColumns) {
  const made::Matrix m = made::matrix(*find_scheme("int4-g32"), 16, 64, 39);
  const std::vector<std::uint8_t> blob = m.pack(RowOrder::plain);
  const Activations a(random_rows(11, 64, 40), 64, 32);
  for (const std::string& isa : made::supported_isas()) {
    Floats out(13 * 50, 77.0f);
    made::kernel_of(isa).gemm[0]({blob.data() + 64, 2, 32, 1.0f}, a.rows, all_rows(11).data(), 11, nullptr,
                                 out.data() + 50 + 17, 50);
    for (int r = 0; r < 13; ++r)
      for (int c = 0; c < 50; ++c) {
        const bool written = r >= 1 && r <= 11 && c >= 17 && c < 33;
        ASSERT_EQ(out[r * 50 + c] == 77.0f, !written) << isa << " " << r << " " << c;
      }
  }
}

}  // namespace
}  // namespace moepack
