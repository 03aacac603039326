// The small floating-point formats of weights, as the OCP Microscaling specification defines them: e2m1 (mxfp4) and
// e4m3 (fp8; no infinities, 0x7f and 0xff are NaN). Values are rounded to nearest, ties to even, and saturate.
#pragma once

#include <cmath>
#include <cstdint>

#include "half.h"

namespace moepack {

constexpr float kE2m1Max = 6.0f;
constexpr float kE4m3Max = 448.0f;

// Sign, 2 bits of exponent, 1 of mantissa: 0 .. 15.
inline std::int8_t e2m1_from_float(float value) {
  const float v = std::fabs(value);
  const int magnitude = (v > 0.25f) + (v >= 0.75f) + (v > 1.25f) + (v >= 1.75f) + (v > 2.5f) + (v >= 3.5f) + (v > 5.0f);
  return static_cast<std::int8_t>(value < 0.0f && magnitude != 0 ? magnitude + 8 : magnitude);
}

inline float e2m1_value(std::uint8_t code) {
  constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, kE2m1Max};
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

// A finite value.
inline std::int8_t e4m3_from_float(float value) {
  const float v = std::fmin(std::fabs(value), kE4m3Max);
  std::uint32_t code;
  if (v < 0x1p-6f) {
    code = static_cast<std::uint32_t>(std::rint(v * 0x1p9f));  // 8 is the smallest normal number
  } else {
    const std::uint32_t bits = bits_of(v);
    code = (bits + 0x7ffff + (bits >> 20 & 1)) / 0x100000 - (120u << 3);
  }
  return static_cast<std::int8_t>(code | (std::signbit(value) ? 0x80 : 0));
}

// Of a code that is no NaN.
inline float e4m3_value(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7fu;
  const float value =
      magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f : float_from_bits((magnitude << 20) + (120u << 23));
  return code & 0x80 ? -value : value;
}

}  // namespace moepack
