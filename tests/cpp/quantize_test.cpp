#include "moepack/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "made.h"

namespace moepack {
namespace {

struct Quantized {
  const Scheme* scheme;
  std::int64_t rows, cols;
  std::int32_t exponent;
  std::vector<std::int8_t> codes;
  std::vector<std::uint16_t> scales;

  double scale(std::int64_t n, std::int64_t k) const {
    const std::int64_t groups = ceil_div(cols, scheme->group);
    return std::ldexp(static_cast<double>(float_from_half(scales[n * groups + k / scheme->group])), exponent);
  }
  double weight(std::int64_t n, std::int64_t k) const { return codes[n * cols + k] * scale(n, k); }
  double squared_error(const std::vector<float>& w) const {
    double sum = 0.0;
    for (std::int64_t i = 0; i < rows * cols; ++i) sum += std::pow(w[i] - weight(i / cols, i % cols), 2);
    return sum;
  }
};

Quantized quantized(const Scheme& scheme, const std::vector<float>& w, std::int64_t cols) {
  const std::int64_t rows = static_cast<std::int64_t>(w.size()) / cols;
  Quantized q{&scheme, rows, cols, scale_exponent(scheme, w.data(), rows * cols), {}, {}};
  q.codes.assign(w.size(), 99);
  q.scales.assign(static_cast<std::size_t>(rows * ceil_div(cols, scheme.group)), 99);
  EXPECT_EQ(quantize_search(scheme, w.data(), rows, cols, q.exponent, q.codes.data(), q.scales.data()).row, -1);
  return q;
}

// packed-format.md, "How scales are chosen", in plain loops: the scale's bits and the codes of one group.
std::uint16_t plain_search(const Scheme& scheme, const std::vector<float>& w, std::vector<float>& codes) {
  const float low = static_cast<float>(scheme.code_min), high = static_cast<float>(scheme.code_max);
  float m = 0.0f, best_error = made::kInf;
  for (const float value : w) m = std::max(m, std::fabs(value));
  std::uint16_t best = 0;
  codes.assign(w.size(), 0.0f);
  for (int j = 0; m > 0.0f && j <= 16; ++j)
    for (const int sign : scheme.cell == Cell::int4 ? std::vector<int>{1, -1} : std::vector<int>{1}) {
      const float d = scheme.cell == Cell::int4 ? 5.0f + static_cast<float>(j) / 4 : 124.0f + static_cast<float>(j) / 2;
      const float s = static_cast<float>(sign) * float_from_half(half_from_float(m / d));
      if (s == 0.0f) continue;
      float t[8] = {};
      std::vector<float> own;
      for (std::size_t i = 0; i < w.size(); ++i) {
        own.push_back(std::clamp(std::rint(w[i] * (1.0f / s)), low, high));
        const float error = w[i] - own[i] * s;
        t[i % 8] = t[i % 8] + error * error;
      }
      const float error = ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
      if (!(error < best_error)) continue;
      best_error = error;
      best = half_from_float(s);
      codes = own;
    }
  return best;
}

TEST(Quantize, EqualsTheDocumentedSearch) {
  for (const Scheme* scheme : made::integer_schemes())
    for (const float factor : {1.0f, 1e-33f, 3e30f})
      for (const std::int64_t cols : {1, 31, 33, 128, 200}) {
        const std::vector<float> w = made::trained(3 * cols, factor, 17);
        const Quantized q = quantized(*scheme, w, cols);
        for (std::int64_t n = 0; n < 3; ++n)
          for (std::int64_t g = 0; g < ceil_div(cols, scheme->group); ++g) {
            std::vector<float> group(static_cast<std::size_t>(scheme->group), 0.0f), codes;
            const std::int64_t begin = g * scheme->group, end = std::min<std::int64_t>(cols, begin + scheme->group);
            for (std::int64_t k = begin; k < end; ++k) group[k - begin] = std::ldexp(w[n * cols + k], -q.exponent);
            ASSERT_EQ(q.scales[n * ceil_div(cols, scheme->group) + g], plain_search(*scheme, group, codes));
            for (std::int64_t k = begin; k < end; ++k) ASSERT_EQ(q.codes[n * cols + k], codes[k - begin]);
          }
      }
}

TEST(Quantize, Exponents) {
  const auto exponent = [](float w) { return scale_exponent(*find_scheme("int4-g32"), &w, 1); };
  EXPECT_EQ(exponent(1.0f), -14);
  EXPECT_EQ(exponent(-1.999f), -14);
  EXPECT_EQ(exponent(2.0f), -13);
  EXPECT_EQ(exponent(0.0f), 0);
  EXPECT_EQ(exponent(-0.0f), 0);
  EXPECT_EQ(exponent(3.4e38f), 113);
  EXPECT_EQ(exponent(0x1p-112f), -126);
  EXPECT_EQ(exponent(1e-45f), -126);
  EXPECT_EQ(scale_exponent(*find_scheme("int4-g32"), nullptr, 0), 0);
}

TEST(Quantize, ZeroMatrixIsExactlyZero) {
  for (const Scheme* scheme : made::integer_schemes()) {
    const Quantized q = quantized(*scheme, {0.0f, -0.0f, 0.0f, -0.0f}, 2);
    EXPECT_EQ(q.exponent, 0);
    EXPECT_EQ(q.codes, std::vector<std::int8_t>(4, 0));
    EXPECT_EQ(q.scales, std::vector<std::uint16_t>(2, 0));
  }
}

TEST(Quantize, AZeroRowAmongOthersIsExactlyZero) {
  for (const Scheme* scheme : made::integer_schemes()) {
    std::vector<float> w = made::trained(3 * 200, 1.0f);
    std::fill(w.begin() + 200, w.begin() + 400, -0.0f);
    const Quantized q = quantized(*scheme, w, 200);
    for (std::int64_t k = 0; k < 200; ++k) {
      ASSERT_EQ(q.codes[200 + k], 0);
      ASSERT_EQ(q.scale(1, k), 0.0);
    }
  }
}

TEST(Quantize, ConstantRowsAreOffByHalfAStepAtMost) {
  for (const Scheme* scheme : made::integer_schemes())
    for (const float c : {1.0f, -1.0f, 0.7f, -1e-20f, 3e7f})
      for (const std::int64_t cols : {1, 32, 130}) {
        const Quantized q = quantized(*scheme, std::vector<float>(static_cast<std::size_t>(cols), c), cols);
        for (std::int64_t k = 0; k < cols; ++k)
          ASSERT_LE(std::fabs(q.weight(0, k) - c), std::fabs(q.scale(0, k)) / 2) << scheme->name << " " << c;
      }
}

TEST(Quantize, RowsFromMinusOneToOneAreOffByHalfAStepAtMost) {
  for (const Scheme* scheme : made::integer_schemes()) {
    std::vector<float> w;
    for (int k = 0; k < scheme->group; ++k) w.push_back(k % 2 ? 1.0f : -1.0f);
    const Quantized q = quantized(*scheme, w, scheme->group);
    for (std::int64_t k = 0; k < scheme->group; ++k)
      ASSERT_LE(std::fabs(q.weight(0, k) - w[k]), std::fabs(q.scale(0, k)) / 2) << scheme->name;
  }
}

// A power of two changes nothing but the exponent, as long as the weights stay normal numbers.
TEST(Quantize, PowersOfTwoChangeTheExponentAlone) {
  for (const Scheme* scheme : made::integer_schemes()) {
    const std::vector<float> w = made::trained(4 * 160, 1.0f);
    const Quantized q = quantized(*scheme, w, 160);
    for (const int power : {-77, -60, 20, 110}) {
      std::vector<float> scaled = w;
      for (float& value : scaled) value = std::ldexp(value, power);
      const Quantized s = quantized(*scheme, scaled, 160);
      EXPECT_EQ(s.exponent, q.exponent + power);
      EXPECT_EQ(s.codes, q.codes);
      EXPECT_EQ(s.scales, q.scales);
    }
  }
}

TEST(Quantize, TinyAndHugeExpertsKeepTheirRelativeError) {
  for (const Scheme* scheme : made::integer_schemes()) {
    const double usual =
        quantized(*scheme, made::trained(8 * 256, 1.0f), 256).squared_error(made::trained(8 * 256, 1.0f));
    for (const float factor : {1e-30f, 1e-23f, 1e6f, 1e30f}) {
      const std::vector<float> w = made::trained(8 * 256, factor);
      const double error = quantized(*scheme, w, 256).squared_error(w) / (static_cast<double>(factor) * factor);
      EXPECT_NEAR(error / usual, 1.0, 0.02) << scheme->name << " " << factor;
    }
  }
}

TEST(Quantize, SubnormalWeightsStayFiniteAndProportionate) {
  for (const Scheme* scheme : made::integer_schemes()) {
    std::vector<float> w = made::trained(2 * 64, 0x1p-125f);
    const Quantized q = quantized(*scheme, w, 64);
    double signal = 0.0;
    for (const float value : w) signal += static_cast<double>(value) * value;
    EXPECT_LT(q.squared_error(w), 0.02 * signal) << scheme->name;

    w.assign(64, 1e-45f);  // below what a scale can say: zero, and no division by it
    const Quantized zero = quantized(*scheme, w, 64);
    for (std::int64_t k = 0; k < 64; ++k) ASSERT_LE(std::fabs(zero.weight(0, k)), 2e-45);
  }
}

// One large weight leaves the other rows' groups with scales near fp16's smallest.
TEST(Quantize, SmallGroupsBesideAHugeWeight) {
  for (const Scheme* scheme : made::integer_schemes())
    for (const float small : {1e-3f, 1e-6f, 1e-8f, 1e-9f, 1e-10f, 1e-20f}) {
      std::vector<float> w(256, small);
      w[0] = 1.0f;
      const Quantized q = quantized(*scheme, w, 128);
      for (std::int64_t k = 0; k < 128; ++k)
        ASSERT_LE(std::fabs(q.weight(1, k) - small), small) << scheme->name << " " << small;
    }
}

TEST(Quantize, NonFiniteWeightsAreNamed) {
  for (const Scheme* scheme : made::integer_schemes())
    for (const float bad : {made::kNaN, made::kInf, -made::kInf}) {
      std::vector<float> w = made::trained(5 * 70, 1.0f);
      w[3 * 70 + 69] = bad;
      w[4 * 70 + 1] = bad;  // the first one is named
      std::vector<std::int8_t> codes(w.size());
      std::vector<std::uint16_t> scales(5 * 3);
      const std::int32_t exponent = scale_exponent(*scheme, w.data(), 5 * 70);
      const NonFinite at = quantize_search(*scheme, w.data(), 5, 70, exponent, codes.data(), scales.data());
      EXPECT_EQ(at.row, 3);
      EXPECT_EQ(at.col, 69);
    }
}

// The rule that most tools use, with the same fp16 scales: amax / 7.5 for 4 bits, amax / 127 for 8.
double error_of_amax_rule(const Scheme& scheme, const std::vector<float>& w, std::int64_t cols, std::int32_t exponent) {
  double sum = 0.0;
  for (std::int64_t begin = 0; begin < static_cast<std::int64_t>(w.size()); begin += scheme.group) {
    float m = 0.0f;
    for (int i = 0; i < scheme.group; ++i) m = std::max(m, std::fabs(std::ldexp(w[begin + i], -exponent)));
    const float s = float_from_half(half_from_float(m / (scheme.cell == Cell::int4 ? 7.5f : 127.0f)));
    for (int i = 0; i < scheme.group; ++i) {
      const float value = std::ldexp(w[begin + i], -exponent);
      const double code = std::clamp<double>(std::rint(value * (1.0f / s)), scheme.code_min, scheme.code_max);
      sum += std::pow(std::ldexp(value - code * s, exponent), 2);
    }
  }
  EXPECT_EQ(cols % scheme.group, 0);
  return sum;
}

TEST(Quantize, NeverWorseThanTheAmaxRule) {
  for (const Scheme* scheme : made::integer_schemes())
    for (std::uint32_t seed = 0; seed < 200; ++seed) {
      std::vector<float> w = made::trained(128, 1.0f, seed);
      if (seed % 3 == 1) w[seed % 128] *= 20.0f;  // an outlier
      if (seed % 3 == 2) w = made::Random(seed).floats(128);
      const Quantized q = quantized(*scheme, w, 128);
      // The search's own sums are fp32: 128 terms, 2^-24 each.
      EXPECT_LE(q.squared_error(w), error_of_amax_rule(*scheme, w, 128, q.exponent) * (1 + 0x1p-16)) << scheme->name;
    }
}

TEST(Quantize, CodesAndScalesStayInTheFormat) {
  for (const Scheme* scheme : made::integer_schemes()) {
    const Quantized q = quantized(*scheme, made::Random(4).floats(32 * 128, -1.7e38f, 1.7e38f), 128);
    for (const std::int8_t code : q.codes) {
      ASSERT_GE(code, scheme->code_min);
      ASSERT_LE(code, scheme->code_max);
    }
    for (const std::uint16_t scale : q.scales) ASSERT_TRUE(std::isfinite(float_from_half(scale)));
  }
}

}  // namespace
}  // namespace moepack
