// e2m1 and e4m3, and the schemes that quantize to them.
#include "minifloat.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "made.h"
#include "moepack/quantize.h"
#include "plain.h"

namespace moepack {
namespace {

// The code of the nearest value; of two, the one with an even last bit.
template <class Decode>
int nearest(float value, int count, Decode decode) {
  int best = 0;
  for (int code = 1; code < count; ++code) {
    const double distance = std::fabs(decode(code) - static_cast<double>(value));
    const double best_distance = std::fabs(decode(best) - static_cast<double>(value));
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return best;
}

TEST(Minifloat, E2m1RoundsToNearestEven) {
  for (int i = -640; i <= 640; ++i) {
    const float value = static_cast<float>(i) / 80.0f;
    const int magnitude =
        nearest(std::fabs(value), 8, [](int code) { return plain::e2m1(static_cast<std::int8_t>(code)); });
    const std::int8_t code = e2m1_from_float(value);
    EXPECT_EQ(code & 7, magnitude) << value;
    EXPECT_EQ(std::fabs(plain::e2m1(code)), plain::e2m1(static_cast<std::int8_t>(magnitude)));
    EXPECT_EQ(code >> 3 & 1, magnitude != 0 && value < 0.0f) << value;
  }
}

TEST(Minifloat, E4m3KeepsItsValues) {
  for (int bits = 0; bits < 256; ++bits) {
    const auto code = static_cast<std::int8_t>(bits);
    const bool nan = (bits & 0x7f) == 0x7f;
    EXPECT_TRUE(nan || e4m3_from_float(plain::e4m3(code)) == code) << bits;
  }
}

TEST(Minifloat, E4m3RoundsToNearestEvenAndSaturates) {
  made::Random random(1);
  for (int i = 0; i < 20000; ++i) {
    const float value = std::ldexp(random.uniform(-1.0f, 1.0f), static_cast<int>(random.below(24)) - 12);
    const int magnitude =
        nearest(std::fabs(value), 127, [](int code) { return plain::e4m3(static_cast<std::int8_t>(code)); });
    EXPECT_EQ(e4m3_from_float(value) & 0x7f, magnitude) << value;
  }
  for (int code = 0; code < 126; ++code) {  // the ties
    const float middle =
        (plain::e4m3(static_cast<std::int8_t>(code)) + plain::e4m3(static_cast<std::int8_t>(code + 1))) / 2;
    EXPECT_EQ(e4m3_from_float(middle), code + code % 2) << middle;
  }
  EXPECT_EQ(e4m3_from_float(1e30f), 0x7e);
  EXPECT_EQ(e4m3_from_float(-1e30f), static_cast<std::int8_t>(0xfe));
}

TEST(Minifloat, ValuesOfEveryCode) {
  for (int code = 0; code < 16; ++code)
    EXPECT_EQ(e2m1_value(static_cast<std::uint8_t>(code)), plain::e2m1(static_cast<std::int8_t>(code)));
  for (int code = -127; code < 127; ++code)  // all but the two NaNs
    EXPECT_EQ(e4m3_value(static_cast<std::uint8_t>(code)), plain::e4m3(static_cast<std::int8_t>(code)));
}

// What quantize_search gives back, through a blob.
std::vector<double> round_trip(const char* name, const std::vector<float>& w, std::int64_t cols) {
  const Scheme& scheme = *find_scheme(name);
  const std::int64_t rows = static_cast<std::int64_t>(w.size()) / cols;
  std::vector<std::int8_t> codes(w.size());
  std::vector<float> scales(static_cast<std::size_t>(rows * ceil_div(cols, scheme.group)));  // the largest type
  EXPECT_EQ(scale_exponent(scheme, w.data(), rows * cols), 0);
  EXPECT_EQ(quantize_search(scheme, w.data(), rows, cols, 0, codes.data(), scales.data()).row, -1);
  for (const std::int8_t code : codes) EXPECT_TRUE(is_code(scheme, code));
  std::vector<std::uint8_t> blob(static_cast<std::size_t>(packed_bytes(scheme, rows, cols, RowOrder::plain)));
  pack(scheme, RowOrder::plain, rows, cols, codes.data(), scales.data(), 0, blob.data());
  const plain::Decoded decoded = plain::decode(blob.data());
  std::vector<double> result;
  for (std::int64_t i = 0; i < rows * cols; ++i) result.push_back(decoded.weight(i / cols, i % cols));
  return result;
}

double sqnr(const std::vector<float>& w, const std::vector<double>& q) {
  double signal = 0.0, noise = 0.0;
  for (std::size_t i = 0; i < w.size(); ++i) {
    signal += std::pow(w[i], 2);
    noise += std::pow(w[i] - q[i], 2);
  }
  return 10 * std::log10(signal / noise);
}

// A uniform error of half a step at 3 bits of mantissa is 2^-4 / sqrt(3) of the value at most: 28.8 dB; with one bit of
// mantissa 2^-2 / sqrt(3): 16.8 dB.
TEST(Minifloat, SignalToNoise) {
  for (const float factor : {1e-30f, 1.0f, 1e30f}) {
    const std::vector<float> w = made::trained(16 * 384, factor, 2);
    EXPECT_GT(sqnr(w, round_trip("fp8-b128", w, 384)), 28.8) << factor;
    EXPECT_GT(sqnr(w, round_trip("mxfp4", w, 384)), 16.8) << factor;
  }
}

TEST(Minifloat, ItsOwnValuesComeBack) {
  std::vector<float> w;
  for (int row = 0; row < 3; ++row)
    for (int k = 0; k < 64; ++k) w.push_back(std::ldexp(plain::e2m1(static_cast<std::int8_t>(k % 16)), 7 * row - 9));
  const std::vector<double> q = round_trip("mxfp4", w, 64);
  for (std::size_t i = 0; i < w.size(); ++i) EXPECT_EQ(q[i], w[i]);
}

TEST(Minifloat, ZerosAndTails) {
  for (const char* name : {"mxfp4", "fp8-b128"}) {
    std::vector<float> w = made::trained(3 * 130, 1.0f, 3);
    std::fill(w.begin() + 130, w.begin() + 260, -0.0f);
    const std::vector<double> q = round_trip(name, w, 130);
    for (int k = 130; k < 260; ++k) EXPECT_EQ(q[k], 0.0) << name;
    EXPECT_GT(sqnr(w, q), 16.8) << name;
  }
}

TEST(Minifloat, TheLargestAndTheSmallestNumbersStayFinite) {
  for (const char* name : {"mxfp4", "fp8-b128"})
    for (const float size : {3.4e38f, 1e-38f, 1e-44f}) {
      const std::vector<float> w = {size, -size, size / 2, 0.0f};
      for (const double value : round_trip(name, w, 4))
        EXPECT_LE(std::fabs(value), 1.07 * size + 0x1p-128) << name << size;  // half a step of the smallest scale
    }
}

TEST(Minifloat, NonFiniteWeightsAreNamed) {
  for (const char* name : {"mxfp4", "fp8-b128"})
    for (const float bad : {made::kNaN, made::kInf}) {
      std::vector<float> w = made::trained(5 * 70, 1.0f, 4), scales(15);
      w[3 * 70 + 69] = bad;
      std::vector<std::int8_t> codes(w.size());
      const NonFinite at = quantize_search(*find_scheme(name), w.data(), 5, 70, 0, codes.data(), scales.data());
      EXPECT_EQ(at.row, 3);
      EXPECT_EQ(at.col, 69);
    }
}

}  // namespace
}  // namespace moepack
