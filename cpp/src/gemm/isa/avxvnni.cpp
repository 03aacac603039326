// AVX-VNNI, 256 bits: vpdpbusd multiplies unsigned by signed bytes and adds four products to an int32.
#include "gemm/instantiate.h"
#include "gemm/isa/vector_avx2.h"

namespace moepack::gemm {
namespace {

struct AvxVnni : VectorAvx2 {
  static constexpr int tile_rows = 4;

  using Partial = Int;
  struct Nibbles {
    __m256i k0_lo, k0_hi, k4_lo, k4_hi;  // k = 0..3 and 4..7 of columns 0..7 and 8..15
  };
  struct Bytes {
    __m256i lo, hi;  // code + 128
  };

  static Partial begin(Int sum) { return sum; }
  static Int end(Partial partial, Int) { return partial; }
  // -8 * sum, times 16: cancels the 128 that makes the codes unsigned.
  static Int start_int8(std::int32_t offset) { return broadcast_int(offset * 16); }

  static Nibbles nibbles(const std::uint8_t* cell) {
    const __m256i mask = _mm256_set1_epi8(15), lo = load_bytes(cell), hi = load_bytes(cell + 32);
    return {_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask), _mm256_and_si256(_mm256_srli_epi16(lo, 4), mask),
            _mm256_and_si256(_mm256_srli_epi16(hi, 4), mask)};
  }
  static Nibbles mxfp4(const std::uint8_t* cell) {
    const Nibbles w = nibbles(cell);
    return {twice_plus_12(w.k0_lo), twice_plus_12(w.k0_hi), twice_plus_12(w.k4_lo), twice_plus_12(w.k4_hi)};
  }
  static Bytes bytes(const std::uint8_t* cell) {
    const __m256i offset = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(load_bytes(cell), offset), _mm256_xor_si256(load_bytes(cell + 32), offset)};
  }

  static void mac(Int& sum, const Nibbles& w, const std::int8_t* a) {
    const __m256i a0 = broadcast4(a), a4 = broadcast4(a + 4);
    sum.lo = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sum.lo, w.k0_lo, a0), w.k4_lo, a4);
    sum.hi = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sum.hi, w.k0_hi, a0), w.k4_hi, a4);
  }
  static void mac(Int& sum, const Bytes& w, const std::int8_t* a) {
    const __m256i x = broadcast4(a);
    sum.lo = _mm256_dpbusd_avx_epi32(sum.lo, w.lo, x);
    sum.hi = _mm256_dpbusd_avx_epi32(sum.hi, w.hi, x);
  }

  struct Half : PiecesAvx2 {
    static Int start_int8(std::int32_t offset) { return broadcast_int(offset * 16); }

    template <int M>
    static void nibble_block(const std::uint8_t* pieces, const std::int8_t* const* a, Int* sum) {
      block<M>(pieces, 32, a, sum, nibbles);
    }
    template <int M>
    static void byte_block(const std::uint8_t* pieces, const std::int8_t* const* a, Int* sum) {
      block<M>(pieces, 64, a, sum, [](const std::uint8_t* piece) -> Rows {
        const __m256i offset = _mm256_set1_epi8(-128);
        const Rows rows = bytes(piece);
        return {_mm256_xor_si256(rows.low, offset), _mm256_xor_si256(rows.high, offset)};
      });
    }

   private:
    template <int M, class Load>
    static void block(const std::uint8_t* pieces, int piece_bytes, const std::int8_t* const* a, Int* sum, Load load) {
      Int low[M] = {}, high[M] = {};
#pragma GCC unroll 4
      for (int k = 0; k < 32; k += 8, pieces += piece_bytes) {
        const Rows w = load(pieces);
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
          const __m256i x = broadcast8(a[i] + k);
          low[i] = _mm256_dpbusd_avx_epi32(low[i], w.low, x);
          high[i] = _mm256_dpbusd_avx_epi32(high[i], w.high, x);
        }
      }
      for (int i = 0; i < M; ++i) sum[i] = _mm256_add_epi32(sum[i], fold(low[i], high[i]));
    }
  };
};

}  // namespace

extern const Kernel avxvnni_kernel;
const Kernel avxvnni_kernel = instantiate<AvxVnni>("avxvnni");

}  // namespace moepack::gemm
