// Activations as the caller has them, fp32, bf16 or fp16, to and from fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"
#include "moepack/ffn.h"

namespace moepack {

inline std::int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// values[0 .. n) from element `begin` on, as fp32: the caller's memory itself, or `buffer` after conversion.
inline const float* to_float(const void* data, DType dtype, std::int64_t begin, std::int64_t n, float* buffer) {
  if (dtype == DType::f32) return static_cast<const float*>(data) + begin;
  const std::uint16_t* in = static_cast<const std::uint16_t*>(data) + begin;
  if (dtype == DType::bf16)
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = float_from_bf16(in[i]);
  else
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = float_from_half(in[i]);
  return buffer;
}

inline void from_float(const float* values, std::int64_t n, void* data, DType dtype, std::int64_t begin) {
  if (dtype == DType::f32) {
    std::memcpy(static_cast<float*>(data) + begin, values, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  std::uint16_t* out = static_cast<std::uint16_t*>(data) + begin;
  if (dtype == DType::bf16)
    for (std::int64_t i = 0; i < n; ++i) out[i] = bf16_from_float(values[i]);
  else
    for (std::int64_t i = 0; i < n; ++i) out[i] = half_from_float(values[i]);
}

}  // namespace moepack
