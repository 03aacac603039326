// fp16 and bf16, converted in software: exact to fp32, round to nearest even from it.
#pragma once

#include <cstdint>
#include <cstring>

namespace moepack {

inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_from_bf16(std::uint16_t b) { return float_from_bits(static_cast<std::uint32_t>(b) << 16); }

inline std::uint16_t bf16_from_float(float value) {
  const std::uint32_t bits = bits_of(value);
  if (value != value) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float_from_half(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent > 0) return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

inline std::uint16_t half_from_float(float value) {
  const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above: infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 aligns the mantissa to fp16's subnormal step and rounds
    const std::uint32_t aligned = bits_of(float_from_bits(magnitude) + 0.5f) - bits_of(0.5f);
    return static_cast<std::uint16_t>(sign | aligned);
  }
  const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<std::uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

}  // namespace moepack
