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
    struct RowPairs {
      int8x16_t low[2], high[2];  // 8 k each of the rows 0, 1 | 4, 5 and 2, 3 | 6, 7
    };

    struct NibblePieces {
      static constexpr int k = 8;
      static RowPairs load(const std::uint8_t* piece) {
        RowPairs w;
        for (int i = 0; i < 2; ++i) {
          const uint8x16_t line = vld1q_u8(piece + 16 * i);
          w.low[i] = vreinterpretq_s8_u8(vandq_u8(line, vdupq_n_u8(15)));
          w.high[i] = vreinterpretq_s8_u8(vshrq_n_u8(line, 4));
        }
        return w;
      }

      struct Sums {
        int32x4_t low[2], high[2];

        void mac(const RowPairs& w, const std::int8_t* a) {
          const int8x16_t x = vcombine_s8(vld1_s8(a), vld1_s8(a));
          for (int i = 0; i < 2; ++i) {
            low[i] = vdotq_s32(low[i], w.low[i], x);
            high[i] = vdotq_s32(high[i], w.high[i], x);
          }
        }
        Int fold(const Int& sum) const {
          return ints([&](int i) { return vaddq_s32(sum.v[i], vpaddq_s32(low[i], high[i])); });
        }
      };
    };

    struct BytePieces : NibblePieces {
      static RowPairs load(const std::uint8_t* piece) {
        RowPairs w;
        for (int i = 0; i < 2; ++i) {
          w.low[i] = vreinterpretq_s8_u8(vld1q_u8(piece + 32 * i));
          w.high[i] = vreinterpretq_s8_u8(vld1q_u8(piece + 32 * i + 16));
        }
        return w;
      }
    };
  };
};

}  // namespace
}  // namespace moepack::gemm
