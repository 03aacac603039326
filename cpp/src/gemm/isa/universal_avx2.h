// Pieces of 8 rows x 8 k of torchao's universal layout, with AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moepack::gemm {
namespace {

struct UniversalAvx2 {
  // 32 bytes in; out the half of an int4 cell: 8 columns of 4 bytes.
  static void universal_nibbles(const std::uint8_t* in, std::uint8_t* out) {
    const __m256i mask = _mm256_set1_epi8(15), line = load(in);
    const __m256i low = _mm256_and_si256(line, mask), high = _mm256_and_si256(_mm256_srli_epi16(line, 4), mask);
    // k = 4..7 move into the high nibbles of k = 0..3, the low half of a row's 8 bytes.
    const __m256i first = _mm256_or_si256(low, _mm256_srli_epi64(low, 28));
    const __m256i second = _mm256_or_si256(high, _mm256_srli_epi64(high, 28));
    store(out, _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(first), _mm256_castsi256_ps(second), 0x88)));
  }

  // 64 bytes in; out the halves of two int8 cells: k = 0..3 and k = 4..7.
  static void universal_bytes(const std::uint8_t* in, std::uint8_t* k0, std::uint8_t* k4) {
    const __m256 rows0 = _mm256_castsi256_ps(load(in)), rows4 = _mm256_castsi256_ps(load(in + 32));
    // Within 128 bits: rows 0, 1, 4, 5 | 2, 3, 6, 7.
    store(k0, in_order(_mm256_shuffle_ps(rows0, rows4, 0x88)));
    store(k4, in_order(_mm256_shuffle_ps(rows0, rows4, 0xdd)));
  }

 private:
  static __m256i load(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(std::uint8_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static __m256i in_order(__m256 v) { return _mm256_permute4x64_epi64(_mm256_castps_si256(v), 0xd8); }
};

}  // namespace
}  // namespace moepack::gemm
