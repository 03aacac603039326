// 16 lanes as two 256-bit registers: everything but the integer dot products, which AVX2 and AVX-VNNI do differently.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "gemm/isa/half_avx2.h"

namespace moepack::gemm {
namespace {

struct VectorAvx2 {
  static constexpr int float_rows = 6;

  struct Float {
    __m256 lo, hi;
  };
  struct Int {
    __m256i lo, hi;
  };

  static Float broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Float load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, Float a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
  }
  static Float load_single(const std::uint8_t* p) {
    return {_mm256_castsi256_ps(load_bytes(p)), _mm256_castsi256_ps(load_bytes(p + 32))};
  }
  static Float load_half(const std::uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
  }
  static Float load_e8m0(const std::uint8_t* p) { return {power_of_two(p), power_of_two(p + 8)}; }
  static Float load_fp8(const std::uint8_t* p) {
    const __m128i zero = _mm_setzero_si128(), bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {float_of_fp8(_mm_unpacklo_epi8(zero, bytes)), float_of_fp8(_mm_unpackhi_epi8(zero, bytes))};
  }

  static Float add(Float a, Float b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static Float sub(Float a, Float b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static Float mul(Float a, Float b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static Float div(Float a, Float b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static Float min(Float a, Float b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static Float max(Float a, Float b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static Float fma(Float a, Float b, Float c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static Float select_less(Float a, Float b, Float then, Float otherwise) {
    return {_mm256_blendv_ps(otherwise.lo, then.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.hi, then.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
  }
  static Float negate(Float a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
  }
  static Float rint(Float a) {
    constexpr int nearest_even = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, nearest_even), _mm256_round_ps(a.hi, nearest_even)};
  }
  static Float pow2(Float n) { return {pow2(n.lo), pow2(n.hi)}; }

  static Int absolute_bits(Float a) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(a.lo), mask), _mm256_and_si256(_mm256_castps_si256(a.hi), mask)};
  }
  static Int max_int(Int a, Int b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
  static std::int32_t reduce_max(Int a) {
    const __m256i m8 = _mm256_max_epi32(a.lo, a.hi);
    const __m128i m4 = _mm_max_epi32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
    const __m128i m2 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m2, _mm_shuffle_epi32(m2, 0xb1)));
  }
  static Float to_float(Int a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
  static void store_codes(std::int8_t* p, Float a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i codes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes);
  }

  static Int broadcast_int(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static void prefetch(const std::uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

 protected:
  static __m256i broadcast4(const std::int8_t* p) {
    std::int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
  }

  // e2m1 codes as twice their value plus 12.
  static __m256i twice_plus_12(__m256i codes) {
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
  }

 private:
  static __m256 power_of_two(const std::uint8_t* exponents) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
  }
  // Bytes in the upper halves of words: sign, exponent and mantissa move to where fp16 has them.
  static __m256 float_of_fp8(__m128i words) {
    return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(static_cast<short>(0xbf80))));
  }
  static __m256 pow2(__m256 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }
};

}  // namespace
}  // namespace moepack::gemm
