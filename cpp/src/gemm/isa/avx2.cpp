// AVX2 with FMA and F16C. Sums of 32 k stay in int16: |pair sum| <= 2 * 15 * 127 per maddubs, and 8 of them fit; of
// mxfp4's 2 * 24 * 127 only 4, so 16 k.
#include "gemm/instantiate.h"
#include "gemm/isa/vector_avx2.h"

namespace moepack::gemm {
namespace {

struct Avx2 : VectorAvx2 {
  static constexpr int tile_rows = 4;

  struct Partial {
    __m256i lo, hi;
  };
  struct Nibbles {
    __m256i k0_lo, k0_hi, k4_lo, k4_hi;  // k = 0..3 and 4..7 of columns 0..7 and 8..15
  };
  struct Bytes {
    __m256i lo, hi;
  };

  static Partial begin(const Int&) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Int end(const Partial& p, const Int& sum) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(p.lo, one)),
            _mm256_add_epi32(sum.hi, _mm256_madd_epi16(p.hi, one))};
  }
  static Int start_int8(std::int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

  static Nibbles nibbles(const std::uint8_t* cell) {
    const __m256i mask = _mm256_set1_epi8(15), lo = load_bytes(cell), hi = load_bytes(cell + 32);
    return {_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask), _mm256_and_si256(_mm256_srli_epi16(lo, 4), mask),
            _mm256_and_si256(_mm256_srli_epi16(hi, 4), mask)};
  }
  static Nibbles mxfp4(const std::uint8_t* cell) {
    const Nibbles w = nibbles(cell);
    return {twice_plus_12(w.k0_lo), twice_plus_12(w.k0_hi), twice_plus_12(w.k4_lo), twice_plus_12(w.k4_hi)};
  }
  static Bytes bytes(const std::uint8_t* cell) { return {load_bytes(cell), load_bytes(cell + 32)}; }

  static void mac(Partial& sum, const Nibbles& w, const std::int8_t* a) {
    const __m256i a0 = broadcast4(a), a4 = broadcast4(a + 4);
    sum.lo = _mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.k0_lo, a0));
    sum.hi = _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.k0_hi, a0));
    sum.lo = _mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.k4_lo, a4));
    sum.hi = _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.k4_hi, a4));
    keep_order(sum.lo, sum.hi);
  }
  static void mac(Int& sum, const Bytes& w, const std::int8_t* a) {
    const __m256i x = broadcast4(a);
    sum.lo = add_products(sum.lo, w.lo, x);
    sum.hi = add_products(sum.hi, w.hi, x);
  }

  struct Half : HalfAvx2 {
    static Int start_int8(std::int32_t) { return _mm256_setzero_si256(); }

    struct NibblePieces {
      static constexpr int k = 8;
      static RowPairs load(const std::uint8_t* piece) { return RowPairs::of_nibbles(piece); }

      struct Sums : RowPairs {  // int16
        void mac(const RowPairs& w, const std::int8_t* a) {
          const __m256i x = broadcast8(a);
          low = _mm256_add_epi16(low, _mm256_maddubs_epi16(w.low, x));
          high = _mm256_add_epi16(high, _mm256_maddubs_epi16(w.high, x));
          keep_order(low, high);
        }
        Int fold(Int sum) const {
          const __m256i one = _mm256_set1_epi16(1);
          const RowPairs pairs = {_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one)};
          return _mm256_add_epi32(sum, pairs.folded());
        }
      };
    };

    struct BytePieces {
      static constexpr int k = 8;
      static RowPairs load(const std::uint8_t* piece) { return RowPairs::of_bytes(piece); }

      struct Sums : RowPairs {
        void mac(const RowPairs& w, const std::int8_t* a) {
          const __m256i x = broadcast8(a);
          low = add_products(low, w.low, x);
          high = add_products(high, w.high, x);
        }
        Int fold(Int sum) const { return _mm256_add_epi32(sum, folded()); }
      };
    };
  };

 private:
  // |w| is unsigned for maddubs and its sign goes to the activations, which are never -128; 2 * 128 * 127 fits int16.
  static __m256i add_products(__m256i sum, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  // gcc otherwise sinks the additions below all multiplications of a group and spills their products.
  static void keep_order(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }
};

}  // namespace

extern const Kernel avx2_kernel;
const Kernel avx2_kernel = instantiate<Avx2>("avx2");

}  // namespace moepack::gemm
