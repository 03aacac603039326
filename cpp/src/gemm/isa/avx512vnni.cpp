// AVX512-VNNI: one register holds a whole vector of 16 lanes, one cell line is one operand of vpdpbusd.
#include <immintrin.h>

#include "gemm/instantiate.h"
#include "gemm/isa/half_avx2.h"

namespace moepack::gemm {
namespace {

struct Avx512Vnni {
  static constexpr int tile_rows = 8;
  static constexpr int float_rows = 12;

  struct Half;
  using Float = __m512;
  using Int = __m512i;
  using Partial = __m512i;
  struct Nibbles {
    __m512i k0, k4;
  };
  struct Bytes {
    __m512i code_plus_128;
  };

  static Float broadcast(float x) { return _mm512_set1_ps(x); }
  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float a) { _mm512_storeu_ps(p, a); }
  static Float load_single(const std::uint8_t* p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
  static Float load_single(const BothHalves& p) { return _mm512_castsi512_ps(both(p)); }
  static Float load_half(const std::uint8_t* p) { return _mm512_cvtph_ps(load_bytes(p)); }
  static Float load_e8m0(const std::uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(load16(p)), 23));
  }
  // Sign, exponent and mantissa move to where fp16 has them.
  static Float load_fp8(const std::uint8_t* p) {
    const __m256i upper = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load16(p)), 8);
    return _mm512_cvtph_ps(
        _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16(static_cast<short>(0xbf80))));
  }

  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float select_less(Float a, Float b, Float then, Float otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
  }
  static Float negate(Float a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static Float rint(Float a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Float pow2(Float n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }

  static Int absolute_bits(Float a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }
  static Int max_int(Int a, Int b) { return _mm512_max_epi32(a, b); }
  static std::int32_t reduce_max(Int a) { return _mm512_reduce_max_epi32(a); }
  static Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }
  static void store_codes(std::int8_t* p, Float a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
  }

  static Int broadcast_int(std::int32_t x) { return _mm512_set1_epi32(x); }
  // -8 * sum, times 16: cancels the 128 that makes the codes unsigned.
  static Int start_int8(std::int32_t offset) { return broadcast_int(offset * 16); }
  static void prefetch(const std::uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

  static Partial begin(Int sum) { return sum; }
  static Int end(Partial partial, Int) { return partial; }

  static Nibbles nibbles(const std::uint8_t* cell) {
    const __m512i mask = _mm512_set1_epi8(15), line = _mm512_loadu_si512(cell);
    return {_mm512_and_si512(line, mask), _mm512_and_si512(_mm512_srli_epi16(line, 4), mask)};
  }
  static Nibbles mxfp4(const std::uint8_t* cell) {
    const __m128i values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    const __m512i table = _mm512_broadcast_i32x4(values);
    const Nibbles w = nibbles(cell);
    return {_mm512_shuffle_epi8(table, w.k0), _mm512_shuffle_epi8(table, w.k4)};
  }
  static Bytes bytes(const std::uint8_t* cell) {
    return {_mm512_xor_si512(_mm512_loadu_si512(cell), _mm512_set1_epi8(-128))};
  }
  static void mac(Int& sum, const Nibbles& w, const std::int8_t* a) {
    sum = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, w.k0, broadcast4(a)), w.k4, broadcast4(a + 4));
  }
  static void mac(Int& sum, const Bytes& w, const std::int8_t* a) {
    sum = _mm512_dpbusd_epi32(sum, w.code_plus_128, broadcast4(a));
  }

  // 8 k of the rows 0, 1, 4, 5 and 2, 3, 6, 7 of torchao's pieces: unsigned codes, or sums of k = 0..3 and k = 4..7.
  struct RowPairs {
    __m512i low, high;

    static RowPairs of_nibbles(__m512i line) {
      const __m512i mask = _mm512_set1_epi8(15);
      return {_mm512_and_si512(line, mask), _mm512_and_si512(_mm512_srli_epi16(line, 4), mask)};
    }
    void add(const RowPairs& w, __m512i x) {
      low = _mm512_dpbusd_epi32(low, w.low, x);
      high = _mm512_dpbusd_epi32(high, w.high, x);
    }
    // Neighbours, added, fall into the order of rows.
    __m512i folded() const {
      const __m512 even = _mm512_shuffle_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high), 0x88);
      const __m512 odd = _mm512_shuffle_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high), 0xdd);
      return _mm512_add_epi32(_mm512_castps_si512(even), _mm512_castps_si512(odd));
    }
  };

  struct NibblePieces {
    static constexpr int k = 8;
    static RowPairs load(const BothHalves& piece) { return RowPairs::of_nibbles(both(piece)); }

    struct Sums : RowPairs {
      void mac(const RowPairs& w, const std::int8_t* a) { add(w, broadcast8(a)); }
      Int fold(Int sum) const { return _mm512_add_epi32(sum, folded()); }
    };
  };

  struct BytePieces : NibblePieces {
    static RowPairs load(const BothHalves& piece) {
      const __m512i first = bytes(piece.first).code_plus_128, second = bytes(piece.second).code_plus_128;
      return {_mm512_shuffle_i64x2(first, second, 0x88), _mm512_shuffle_i64x2(first, second, 0xdd)};
    }
  };

 private:
  static __m512i both(const BothHalves& p) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_bytes(p.first)), load_bytes(p.second), 1);
  }
  static __m512i broadcast8(const std::int8_t* p) {
    std::int64_t eight;
    __builtin_memcpy(&eight, p, sizeof eight);
    return _mm512_set1_epi64(eight);
  }
  static __m128i load16(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m512i broadcast4(const std::int8_t* p) {
    std::int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
  }
};

// One half at a time: two 4-bit pieces a register, which are 16 k, or one 8-bit piece.
struct Avx512Vnni::Half : HalfAvx2 {
  static Int start_int8(std::int32_t offset) { return broadcast_int(offset * 16); }

  struct NibblePieces {
    static constexpr int k = 16;
    static RowPairs load(const std::uint8_t* pieces) { return RowPairs::of_nibbles(_mm512_loadu_si512(pieces)); }

    struct Sums : RowPairs {
      void mac(const RowPairs& w, const std::int8_t* a) {
        const __m512i spread = _mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1);
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
        add(w, _mm512_permutexvar_epi64(spread, _mm512_castsi128_si512(codes)));
      }
      Int fold(Int sum) const {
        const __m512i pieces = folded();
        return _mm256_add_epi32(sum,
                                _mm256_add_epi32(_mm512_castsi512_si256(pieces), _mm512_extracti64x4_epi64(pieces, 1)));
      }
    };
  };

  struct BytePieces {
    static constexpr int k = 8;
    static Bytes load(const std::uint8_t* piece) { return bytes(piece); }

    struct Sums {
      __m512i pairs;  // of the rows 0..7

      void mac(const Bytes& w, const std::int8_t* a) {
        pairs = _mm512_dpbusd_epi32(pairs, w.code_plus_128, broadcast8(a));
      }
      Int fold(Int sum) const {
        const __m512i added = _mm512_add_epi32(pairs, _mm512_srli_epi64(pairs, 32));
        return _mm256_add_epi32(sum, _mm512_cvtepi64_epi32(added));
      }
    };
  };
};

}  // namespace

extern const Kernel avx512vnni_kernel;
const Kernel avx512vnni_kernel = instantiate<Avx512Vnni>("avx512vnni");

}  // namespace moepack::gemm
