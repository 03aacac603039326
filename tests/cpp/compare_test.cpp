#include "moepack/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "made.h"
#include "moepack/quantize.h"
#include "plain.h"

namespace moepack {
namespace {

struct Sums {
  Squares found, expected;
};

// What `compare` says, and the same in double from what an independent decoder makes of the packed blob.
Sums sums_of(const Scheme& scheme, const std::vector<float>& w, std::int64_t cols) {
  const std::int64_t rows = static_cast<std::int64_t>(w.size()) / cols;
  const std::int32_t exponent = scale_exponent(scheme, w.data(), rows * cols);
  std::vector<std::int8_t> codes(w.size());
  std::vector<float> scales(static_cast<std::size_t>(rows * ceil_div(cols, scheme.group)));  // the largest type
  EXPECT_EQ(quantize_search(scheme, w.data(), rows, cols, exponent, codes.data(), scales.data()).row, -1);
  Sums sums{compare(scheme, w.data(), rows, cols, codes.data(), scales.data(), exponent), {}};
  std::vector<std::uint8_t> blob(static_cast<std::size_t>(packed_bytes(scheme, rows, cols, RowOrder::plain)));
  pack(scheme, RowOrder::plain, rows, cols, codes.data(), scales.data(), exponent, blob.data());
  const plain::Decoded decoded = plain::decode(blob.data());
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    sums.expected.weights += std::pow(static_cast<double>(w[i]), 2);
    sums.expected.errors += std::pow(w[i] - decoded.weight(i / cols, i % cols), 2);
  }
  return sums;
}

// A lane adds cols / 8 squares in fp32. A difference of close numbers has the rounding of value * scale in it, 2^-24 of
// the weight: alone it is all of the error, and its square 2^-48 of the weight's.
TEST(Compare, EqualsTheSumsInDouble) {
  for (const Scheme* scheme = schemes_begin(); scheme != schemes_end(); ++scheme)
    for (const float factor : {1.0f, 1e-30f, 3e30f})
      for (const std::int64_t cols : {1, 31, 32, 33, 160, 200}) {
        const Sums sums = sums_of(*scheme, made::trained(5 * cols, factor, 3), cols);
        EXPECT_NEAR(sums.found.weights / sums.expected.weights, 1.0, 1e-5) << scheme->name << " " << cols;
        EXPECT_NEAR(sums.found.errors, sums.expected.errors,
                    1e-3 * sums.expected.errors + 0x1p-46 * sums.expected.weights)
            << scheme->name << " " << cols;
      }
}

TEST(Compare, ZerosAndExactWeightsHaveNoError) {
  for (const Scheme* scheme = schemes_begin(); scheme != schemes_end(); ++scheme) {
    const Squares zero = sums_of(*scheme, std::vector<float>(3 * 40, 0.0f), 40).found;
    EXPECT_EQ(zero.weights, 0.0);
    EXPECT_EQ(zero.errors, 0.0);
  }
  const Squares ones = sums_of(*find_scheme("mxfp4"), std::vector<float>(3 * 40, -1.0f), 40).found;
  EXPECT_EQ(ones.weights, 120.0);
  EXPECT_EQ(ones.errors, 0.0);
}

// Scales that were given, not searched for, may span all of their type.
TEST(Compare, FaintRowsBesideStrongOnes) {
  const Scheme& scheme = *find_scheme("fp8-b128");
  const std::vector<float> w = {0x1p-100f, 0x1p100f};
  const std::vector<std::int8_t> codes = {0x38, 0x38};  // 1
  const std::vector<float> scales = {0x1p-101f, 0x1p100f};
  const Squares both = compare(scheme, w.data(), 2, 1, codes.data(), scales.data(), 0);
  EXPECT_EQ(both.weights, 0x1p200);
  EXPECT_EQ(both.errors, 0x1p-202);
}

TEST(Compare, AWrongCodeIsSeen) {
  const Scheme& scheme = *find_scheme("int4-g32");
  const std::vector<float> w(32, 2.0f);
  std::vector<std::int8_t> codes(32, 2);
  codes[31] = -2;
  const std::uint16_t one = 0x3c00;
  const Squares found = compare(scheme, w.data(), 1, 32, codes.data(), &one, 0);
  EXPECT_EQ(found.weights, 128.0);
  EXPECT_EQ(found.errors, 16.0);
}

}  // namespace
}  // namespace moepack
