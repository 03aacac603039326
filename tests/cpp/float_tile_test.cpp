// The tile of fp8 weights: every instruction set against op.md in plain loops, bit by bit.
#include "gemm/float_tile.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "made.h"
#include "plain.h"

namespace moepack {
namespace {

using Floats = std::vector<float>;

made::Matrix matrix(std::int64_t rows, std::int64_t cols, std::uint32_t seed) {
  return made::matrix(*find_scheme("fp8-b128"), rows, cols, seed);
}

// The kernel on all panels of a matrix: [count, rows padded to panels].
Floats kernel_gemm(const std::string& isa, const made::Matrix& m, const std::vector<Floats>& x,
                   const std::vector<std::int32_t>& index, const float* bias) {
  const std::int64_t stride = round_up(m.cols, 128), width = round_up(m.rows, 16);
  Floats values(x.size() * static_cast<std::size_t>(stride), 0.0f);
  for (std::size_t r = 0; r < x.size(); ++r) std::copy(x[r].begin(), x[r].end(), values.begin() + r * stride);
  gemm::Rows rows{};
  rows.values = values.data();
  rows.value_stride = stride;
  const std::vector<std::uint8_t> blob = m.pack(RowOrder::plain);
  Floats out(index.size() * static_cast<std::size_t>(width), made::kNaN);
  for (std::int64_t p = 0; p < width / 16; ++p)
    made::kernel_of(isa).gemm[static_cast<int>(gemm::PanelKind::fp8)](
        {blob.data() + 64 + p * panel_bytes(*m.scheme, m.cols), static_cast<int>(m.groups()), 128,
         std::ldexp(1.0f, m.exponent + 8)},
        rows, index.data(), static_cast<int>(index.size()), bias ? bias + 16 * p : nullptr, out.data() + 16 * p, width);
  return out;
}

Floats plain_gemm(const made::Matrix& m, const std::vector<Floats>& x, const std::vector<std::int32_t>& index,
                  const float* bias) {
  const std::vector<std::uint8_t> blob = m.pack(RowOrder::plain);
  const plain::Decoded decoded = plain::decode(blob.data());
  Floats out;
  for (const std::int32_t row : index) {
    Floats own = plain::gemm(decoded, x[row], bias);
    for (std::int64_t n = m.rows; n < round_up(m.rows, 16); ++n) own.push_back(bias ? 0.0f + bias[n] : 0.0f);
    out.insert(out.end(), own.begin(), own.end());
  }
  return out;
}

std::vector<Floats> random_rows(int count, std::int64_t cols, std::uint32_t seed) {
  std::vector<Floats> rows;
  made::Random random(seed);
  for (int r = 0; r < count; ++r) rows.push_back(random.floats(cols));
  return rows;
}

std::vector<std::int32_t> all_rows(int count) {
  std::vector<std::int32_t> index(static_cast<std::size_t>(count));
  std::iota(index.begin(), index.end(), 0);
  return index;
}

void expect_all_isas(const made::Matrix& m, const std::vector<Floats>& x, const std::vector<std::int32_t>& index,
                     const float* bias = nullptr) {
  const Floats expected = plain_gemm(m, x, index, bias);
  for (const std::string& isa : made::supported_isas())
    ASSERT_TRUE(made::same(kernel_gemm(isa, m, x, index, bias), expected))
        << isa << " " << m.rows << "x" << m.cols << ", rows " << index.size();
}

TEST(FloatTile, ShapesWithTails) {
  for (const std::int64_t cols : {1, 31, 32, 127, 128, 129, 300, 512})
    for (const std::int64_t rows : {1, 17})
      expect_all_isas(matrix(rows, cols, 21), random_rows(3, cols, 22), all_rows(3));
}

TEST(FloatTile, RowCountsAroundEveryTile) {
  for (int count = 0; count <= 27; ++count)
    expect_all_isas(matrix(16, 200, 23), random_rows(count, 200, 24), all_rows(count));
}

TEST(FloatTile, BiasAndRepeatedRows) {
  const Floats bias = made::Random(25).floats(48);
  expect_all_isas(matrix(48, 96, 26), random_rows(7, 96, 27), {6, 0, 3, 3, 3, 5, 1}, bias.data());
}

// A row alone takes four parts at once, in a batch one after the other: the same bits.
TEST(FloatTile, EveryCodeAloneAndInABatch) {
  made::Matrix m = matrix(16, 256, 28);
  for (int i = 0; i < 16 * 256; ++i)
    m.codes[i] = is_code(*m.scheme, static_cast<std::int8_t>(i)) ? static_cast<std::int8_t>(i) : std::int8_t{0};
  const std::vector<Floats> x = random_rows(9, 256, 29);
  const Floats batch = plain_gemm(m, x, all_rows(9), nullptr);
  expect_all_isas(m, x, all_rows(9));
  for (const std::string& isa : made::supported_isas())
    for (int r = 0; r < 9; ++r)
      ASSERT_TRUE(made::same(kernel_gemm(isa, m, x, {r}, nullptr), made::rows_of(batch, r, r + 1, 16))) << isa << r;
}

TEST(FloatTile, AnInfinityStaysInItsRow) {
  const made::Matrix m = matrix(16, 200, 30);
  std::vector<Floats> x = random_rows(5, 200, 31);
  x[2][150] = made::kInf;
  expect_all_isas(m, x, all_rows(5));
}

}  // namespace
}  // namespace moepack
