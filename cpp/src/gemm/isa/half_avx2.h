// 8 lanes in one 256-bit register, for the panels of torchao's layout.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moepack::gemm {
namespace {

inline __m256i load_bytes(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

struct HalfAvx2 {
  using Float = __m256;
  using Int = __m256i;

  static Float broadcast(float x) { return _mm256_set1_ps(x); }
  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static Float load_single(const std::uint8_t* p) { return _mm256_castsi256_ps(load_bytes(p)); }
  static void store(float* p, Float a) { _mm256_storeu_ps(p, a); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float to_float(Int a) { return _mm256_cvtepi32_ps(a); }
  static Int broadcast_int(std::int32_t x) { return _mm256_set1_epi32(x); }
};

// What AVX2 and AVX-VNNI share: a piece as 8 k of the rows 0, 1, 4, 5 and of the rows 2, 3, 6, 7.
struct RowPairs {
  __m256i low, high;

  static RowPairs of_nibbles(const std::uint8_t* piece) {
    const __m256i mask = _mm256_set1_epi8(15), line = load_bytes(piece);
    return {_mm256_and_si256(line, mask), _mm256_and_si256(_mm256_srli_epi16(line, 4), mask)};
  }
  static RowPairs of_bytes(const std::uint8_t* piece) {
    const __m256i top = load_bytes(piece), bottom = load_bytes(piece + 32);
    return {_mm256_permute2x128_si256(top, bottom, 0x20), _mm256_permute2x128_si256(top, bottom, 0x31)};
  }
  // Neighbours, added, fall into the order of rows.
  __m256i folded() const { return _mm256_hadd_epi32(low, high); }
};

// 8 k of a row, for every row of a piece.
inline __m256i broadcast8(const std::int8_t* p) {
  std::int64_t eight;
  __builtin_memcpy(&eight, p, sizeof eight);
  return _mm256_set1_epi64x(eight);
}

}  // namespace
}  // namespace moepack::gemm
