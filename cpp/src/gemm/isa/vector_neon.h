// 16 lanes as four 128-bit registers, or 8 as two: everything but the integer dot products.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace moepack::gemm {
namespace {

// What every vector does, of N registers.
template <int N>
struct LanesNeon {
  struct Float {
    float32x4_t v[N];
  };
  struct Int {
    int32x4_t v[N];
  };

  // Written out: gcc keeps an array that a loop fills in memory.
  template <class F>
  static Float floats(F f) {
    if constexpr (N == 2)
      return {{f(0), f(1)}};
    else
      return {{f(0), f(1), f(2), f(3)}};
  }
  template <class F>
  static Int ints(F f) {
    if constexpr (N == 2)
      return {{f(0), f(1)}};
    else
      return {{f(0), f(1), f(2), f(3)}};
  }

  static Float broadcast(float x) {
    return floats([=](int) { return vdupq_n_f32(x); });
  }
  static Float load(const float* p) {
    return floats([=](int i) { return vld1q_f32(p + 4 * i); });
  }
  static Float load_single(const std::uint8_t* p) {
    return floats([=](int i) { return vreinterpretq_f32_u8(vld1q_u8(p + 16 * i)); });
  }
  static void store(float* p, const Float& a) {
    for (int i = 0; i < N; ++i) vst1q_f32(p + 4 * i, a.v[i]);
  }
  static Float add(const Float& a, const Float& b) {
    return floats([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
  }
  static Float mul(const Float& a, const Float& b) {
    return floats([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
  }
  static Float fma(const Float& a, const Float& b, const Float& c) {
    return floats([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
  }
  static Float to_float(const Int& a) {
    return floats([&](int i) { return vcvtq_f32_s32(a.v[i]); });
  }
  static Int broadcast_int(std::int32_t x) {
    return ints([=](int) { return vdupq_n_s32(x); });
  }
  // Codes are signed bytes here: nothing to cancel.
  static Int start_int8(std::int32_t) { return broadcast_int(0); }
};

struct VectorNeon : LanesNeon<4> {
  static constexpr int float_rows = 4;

  static Float load_half(const std::uint8_t* p) {
    return floats([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
  }
  static Float load_e8m0(const std::uint8_t* p) {
    const uint8x16_t exponents = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(exponents)), high = vmovl_u8(vget_high_u8(exponents));
    const auto power = [](uint16x4_t e) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(e), 23)); };
    return {
        {power(vget_low_u16(low)), power(vget_high_u16(low)), power(vget_low_u16(high)), power(vget_high_u16(high))}};
  }
  // Bytes in the upper halves of words: sign, exponent and mantissa move to where fp16 has them.
  static Float load_fp8(const std::uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const auto half = [](uint8x16_t words) {
      const int16x8_t moved = vshrq_n_s16(vreinterpretq_s16_u8(words), 1);
      return vreinterpretq_f16_s16(vandq_s16(moved, vdupq_n_s16(static_cast<std::int16_t>(0xbf80))));
    };
    const float16x8_t low = half(vzip1q_u8(vdupq_n_u8(0), bytes)), high = half(vzip2q_u8(vdupq_n_u8(0), bytes));
    return {{vcvt_f32_f16(vget_low_f16(low)), vcvt_f32_f16(vget_high_f16(low)), vcvt_f32_f16(vget_low_f16(high)),
             vcvt_f32_f16(vget_high_f16(high))}};
  }

  static Float sub(const Float& a, const Float& b) {
    return floats([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
  }
  static Float div(const Float& a, const Float& b) {
    return floats([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
  }
  // The second operand where one is NaN, unlike vminq and vmaxq.
  static Float min(const Float& a, const Float& b) { return select_less(a, b, a, b); }
  static Float max(const Float& a, const Float& b) { return select_less(b, a, a, b); }
  static Float select_less(const Float& a, const Float& b, const Float& then, const Float& otherwise) {
    return floats([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), then.v[i], otherwise.v[i]); });
  }
  static Float negate(const Float& a) {
    return floats([&](int i) { return vnegq_f32(a.v[i]); });
  }
  static Float rint(const Float& a) {
    return floats([&](int i) { return vrndnq_f32(a.v[i]); });
  }
  static Float pow2(const Float& n) {
    return floats([&](int i) {
      const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127));
      return vreinterpretq_f32_s32(vshlq_n_s32(biased, 23));
    });
  }

  static Int absolute_bits(const Float& a) {
    return ints([&](int i) { return vreinterpretq_s32_f32(vabsq_f32(a.v[i])); });
  }
  static Int max_int(const Int& a, const Int& b) {
    return ints([&](int i) { return vmaxq_s32(a.v[i], b.v[i]); });
  }
  static std::int32_t reduce_max(const Int& a) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
  }
  static void store_codes(std::int8_t* p, const Float& a) {
    const auto narrow = [&](int i) {
      return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a.v[i])), vqmovn_s32(vcvtnq_s32_f32(a.v[i + 1])));
    };
    vst1q_s8(p, vcombine_s8(vqmovn_s16(narrow(0)), vqmovn_s16(narrow(2))));
  }

  static void prefetch(const std::uint8_t* p) { __builtin_prefetch(p); }
};

}  // namespace
}  // namespace moepack::gemm
