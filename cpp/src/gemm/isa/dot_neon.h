// The integer dot products of NEON with sdot (Armv8.2 dotprod), which adds four products of signed bytes to an int32.
#pragma once

#include "gemm/isa/vector_neon.h"

namespace moepack::gemm {
namespace {

struct DotNeon : VectorNeon {
  using Partial = Int;
  struct Nibbles {
    int8x16_t k0[4], k4[4];  // k = 0..3 and 4..7; register i holds columns 4i .. 4i+3
  };
  struct Bytes {
    int8x16_t columns[4];
  };

  static Partial begin(const Int& sum) { return sum; }
  static Int end(const Partial& partial, const Int&) { return partial; }

  static Nibbles nibbles(const std::uint8_t* cell) {
    Nibbles w;
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t line = vld1q_u8(cell + 16 * i);
      w.k0[i] = vreinterpretq_s8_u8(vandq_u8(line, vdupq_n_u8(15)));
      w.k4[i] = vreinterpretq_s8_u8(vshrq_n_u8(line, 4));
    }
    return w;
  }
  // Twice the value plus 12, which fits the signed bytes of sdot as well.
  static Nibbles mxfp4(const std::uint8_t* cell) {
    const std::int8_t values[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    const int8x16_t table = vld1q_s8(values);
    Nibbles w = nibbles(cell);
    for (int i = 0; i < 4; ++i) {
      w.k0[i] = vqtbl1q_s8(table, vreinterpretq_u8_s8(w.k0[i]));
      w.k4[i] = vqtbl1q_s8(table, vreinterpretq_u8_s8(w.k4[i]));
    }
    return w;
  }
  static Bytes bytes(const std::uint8_t* cell) {
    Bytes w;
    for (int i = 0; i < 4; ++i) w.columns[i] = vreinterpretq_s8_u8(vld1q_u8(cell + 16 * i));
    return w;
  }

  static void mac(Int& sum, const Nibbles& w, const std::int8_t* a) {
    const int8x8_t x = vld1_s8(a);
    for (int i = 0; i < 4; ++i) sum.v[i] = vdotq_lane_s32(vdotq_lane_s32(sum.v[i], w.k0[i], x, 0), w.k4[i], x, 1);
  }
  static void mac(Int& sum, const Bytes& w, const std::int8_t* a) {
    std::int32_t four;
    __builtin_memcpy(&four, a, sizeof four);
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
    for (int i = 0; i < 4; ++i) sum.v[i] = vdotq_s32(sum.v[i], w.columns[i], x);
  }

  struct Half : LanesNeon<2> {
    template <int M>
    static void nibble_block(const std::uint8_t* pieces, const std::int8_t* const* a, Int* sum) {
      block<M>(pieces, 32, a, sum, [](const std::uint8_t* piece) {
        Rows w;
        for (int i = 0; i < 2; ++i) {
          const uint8x16_t line = vld1q_u8(piece + 16 * i);
          w.low[i] = vreinterpretq_s8_u8(vandq_u8(line, vdupq_n_u8(15)));
          w.high[i] = vreinterpretq_s8_u8(vshrq_n_u8(line, 4));
        }
        return w;
      });
    }
    template <int M>
    static void byte_block(const std::uint8_t* pieces, const std::int8_t* const* a, Int* sum) {
      block<M>(pieces, 64, a, sum, [](const std::uint8_t* piece) {
        Rows w;
        for (int i = 0; i < 2; ++i) {
          w.low[i] = vreinterpretq_s8_u8(vld1q_u8(piece + 32 * i));
          w.high[i] = vreinterpretq_s8_u8(vld1q_u8(piece + 32 * i + 16));
        }
        return w;
      });
    }

   private:
    struct Rows {
      int8x16_t low[2], high[2];  // 8 k each of the rows 0, 1 | 4, 5 and 2, 3 | 6, 7
    };

    // The two sums of each row, of k = 0..3 and of k = 4..7, are added at the end.
    template <int M, class Load>
    static void block(const std::uint8_t* pieces, int piece_bytes, const std::int8_t* const* a, Int* sum, Load load) {
      Int low[M], high[M];
      for (int i = 0; i < M; ++i) low[i] = high[i] = broadcast_int(0);
#pragma GCC unroll 4
      for (int k = 0; k < 32; k += 8, pieces += piece_bytes) {
        const Rows w = load(pieces);
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
          const int8x16_t x = vcombine_s8(vld1_s8(a[i] + k), vld1_s8(a[i] + k));
          for (int j = 0; j < 2; ++j) {
            low[i].v[j] = vdotq_s32(low[i].v[j], w.low[j], x);
            high[i].v[j] = vdotq_s32(high[i].v[j], w.high[j], x);
          }
        }
      }
      for (int i = 0; i < M; ++i)
        sum[i] = ints([&](int j) { return vaddq_s32(sum[i].v[j], vpaddq_s32(low[i].v[j], high[i].v[j])); });
    }
  };
};

}  // namespace
}  // namespace moepack::gemm
