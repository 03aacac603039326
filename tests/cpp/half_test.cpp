#include "half.h"

#include <gtest/gtest.h>

#include <cmath>

#include "made.h"

namespace moepack {
namespace {

// The value of an fp16 number by its definition.
float value_of_half(std::uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31), mantissa = static_cast<int>(bits & 1023);
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? made::kNaN : sign * made::kInf;
  return sign * (exponent ? std::ldexp(1024.0f + static_cast<float>(mantissa), exponent - 25)
                          : std::ldexp(static_cast<float>(mantissa), -24));
}

TEST(Half, EveryHalfHasItsValue) {
  for (std::uint32_t h = 0; h < 0x10000; ++h)
    ASSERT_TRUE(made::same(float_from_half(static_cast<std::uint16_t>(h)), value_of_half(h))) << std::hex << h;
}

TEST(Half, EveryHalfComesBack) {
  for (std::uint32_t h = 0; h < 0x10000; ++h) {
    const float value = value_of_half(h);
    const std::uint16_t back = half_from_float(value);
    if (value == value)
      ASSERT_EQ(back, h);
    else
      ASSERT_NE(float_from_half(back), float_from_half(back)) << std::hex << h;
  }
}

// At the middle between neighbours the even one, a hair beside it the nearer one; 65520 is the middle before infinity.
TEST(Half, EveryBoundaryRoundsToNearestEven) {
  for (std::uint32_t h = 0; h < 0x7c00; ++h) {
    const float next = h == 0x7bff ? 65536.0f : value_of_half(h + 1);
    const float middle = (value_of_half(h) + next) / 2;
    const std::uint32_t even = h % 2 ? h + 1 : h;
    ASSERT_EQ(half_from_float(middle), even) << std::hex << h;
    ASSERT_EQ(half_from_float(-middle), even | 0x8000) << std::hex << h;
    ASSERT_EQ(half_from_float(std::nextafter(middle, 0.0f)), h) << std::hex << h;
    ASSERT_EQ(half_from_float(-std::nextafter(middle, made::kInf)), (h + 1) | 0x8000) << std::hex << h;
  }
}

TEST(Half, ExtremesOfFloat) {
  EXPECT_EQ(half_from_float(3e38f), 0x7c00);
  EXPECT_EQ(half_from_float(-3e38f), 0xfc00);
  EXPECT_EQ(half_from_float(1e-45f), 0);
  EXPECT_EQ(half_from_float(-1e-45f), 0x8000);
  EXPECT_EQ(half_from_float(-0.0f), 0x8000);
}

TEST(Bf16, EveryBf16HasItsValueAndComesBack) {
  for (std::uint32_t b = 0; b < 0x10000; ++b) {
    const float value = float_from_bf16(static_cast<std::uint16_t>(b));
    ASSERT_EQ(bits_of(value), b << 16);
    if (value == value)
      ASSERT_EQ(bf16_from_float(value), b);
    else
      ASSERT_NE(float_from_bf16(bf16_from_float(value)), value);
  }
}

TEST(Bf16, EveryBoundaryRoundsToNearestEven) {
  for (std::uint32_t b = 0; b < 0x7f80; ++b)
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const std::uint32_t middle = (b | sign) << 16 | 0x8000;
      ASSERT_EQ(bf16_from_float(float_from_bits(middle)), (b % 2 ? b + 1 : b) | sign) << std::hex << b;
      ASSERT_EQ(bf16_from_float(float_from_bits(middle - 1)), b | sign) << std::hex << b;
      ASSERT_EQ(bf16_from_float(float_from_bits(middle + 1)), (b + 1) | sign) << std::hex << b;
    }
}

TEST(HalfAndBf16, NaNStaysNaNWhateverItsPayload) {
  for (int bit = 0; bit < 23; ++bit)
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const float nan = float_from_bits(sign | 0x7f800000u | 1u << bit);
      EXPECT_TRUE(std::isnan(float_from_half(half_from_float(nan)))) << bit;
      EXPECT_TRUE(std::isnan(float_from_bf16(bf16_from_float(nan)))) << bit;
    }
  EXPECT_TRUE(std::isnan(float_from_bf16(bf16_from_float(float_from_bits(0xffffffffu)))));
}

}  // namespace
}  // namespace moepack
