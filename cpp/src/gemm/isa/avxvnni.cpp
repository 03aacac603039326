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

  struct Half : HalfAvx2 {
    static Int start_int8(std::int32_t offset) { return broadcast_int(offset * 16); }

    struct NibblePieces {
      static constexpr int k = 8;
      static RowPairs load(const std::uint8_t* piece) { return RowPairs::of_nibbles(piece); }

      struct Sums : RowPairs {
        void mac(const RowPairs& w, const std::int8_t* a) {
          const __m256i x = broadcast8(a);
          low = _mm256_dpbusd_avx_epi32(low, w.low, x);
          high = _mm256_dpbusd_avx_epi32(high, w.high, x);
        }
        Int fold(Int sum) const { return _mm256_add_epi32(sum, folded()); }
      };
    };

    struct BytePieces : NibblePieces {
      static RowPairs load(const std::uint8_t* piece) {
        const __m256i offset = _mm256_set1_epi8(-128);
        const RowPairs codes = RowPairs::of_bytes(piece);
        return {_mm256_xor_si256(codes.low, offset), _mm256_xor_si256(codes.high, offset)};
      }
    };
  };
};

}  // namespace

extern const Kernel avxvnni_kernel;
const Kernel avxvnni_kernel = instantiate<AvxVnni>("avxvnni");

}  // namespace moepack::gemm
