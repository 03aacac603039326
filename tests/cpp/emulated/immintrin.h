// The intrinsics that the AVX-VNNI and AVX512-VNNI kernels use, in plain C++ after Intel's descriptions of them. Found
// instead of the compiler's header when those kernels are compiled for a test that runs on any CPU. An intrinsic that
// is missing here fails to compile: add it.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"

struct __m128i {
  std::uint8_t bytes[16];
};
struct __m256i {
  std::uint8_t bytes[32];
};
struct __m512i {
  std::uint8_t bytes[64];
};
struct __m256 {
  std::uint8_t bytes[32];
};
struct __m512 {
  std::uint8_t bytes[64];
};
using __mmask16 = std::uint16_t;

constexpr int _CMP_LT_OQ = 17, _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8, _MM_HINT_T0 = 3;

namespace moepack::emulated {

template <class Lane, class Register>
struct Lanes {
  static constexpr int count = sizeof(Register) / sizeof(Lane);
  Lane v[count];
};

template <class Lane, class Register>
Lanes<Lane, Register> lanes(const Register& r) {
  Lanes<Lane, Register> result;
  std::memcpy(&result, &r, sizeof r);
  return result;
}

// A register whose lane i is f(i).
template <class Lane, class Register, class F>
Register made(F f) {
  Lanes<Lane, Register> values;
  for (int i = 0; i < values.count; ++i) values.v[i] = static_cast<Lane>(f(i));
  Register result;
  std::memcpy(&result, &values, sizeof result);
  return result;
}

template <class Register>
Register loaded(const void* p) {
  Register result;
  std::memcpy(&result, p, sizeof result);
  return result;
}

template <class Out, class In>
Out cast(const In& a) {
  static_assert(sizeof(Out) <= sizeof(In));
  return loaded<Out>(&a);
}

inline int saturate(int value, int limit) { return value < -limit - 1 ? -limit - 1 : value > limit ? limit : value; }

// Out of range, NaN included: the "integer indefinite".
inline std::int32_t to_int(float x) {
  return x >= -0x1p31f && x < 0x1p31f ? static_cast<std::int32_t>(__builtin_rintf(x)) : INT32_MIN;
}

// Inlined into a tile it makes functions that take the compiler minutes.
template <class Register>
[[gnu::noinline]] Register dpbusd(const Register& sum, const Register& a, const Register& b) {
  const auto s = lanes<std::uint32_t>(sum);
  const auto u = lanes<std::uint8_t>(a);
  const auto i = lanes<std::int8_t>(b);
  return made<std::uint32_t, Register>([&](int l) {
    std::int32_t products = 0;
    for (int k = 4 * l; k < 4 * l + 4; ++k) products += u.v[k] * i.v[k];
    return s.v[l] + static_cast<std::uint32_t>(products);
  });
}

// Widens the first bytes of a register.
template <class Lane, class Register>
Register widened(const __m128i& a) {
  return made<Lane, Register>([&](int i) { return a.bytes[i]; });
}

template <class Register, class Halves>
Register floats_of(const Halves& a) {
  const auto h = lanes<std::uint16_t>(a);
  return made<float, Register>([&](int i) { return float_from_half(h.v[i]); });
}

template <class Register>
Register repeated(const __m128i& a) {
  return made<std::uint8_t, Register>([&](int i) { return a.bytes[i % 16]; });
}

template <class Register>
Register shuffled_bytes(const Register& a, const Register& index) {
  return made<std::uint8_t, Register>(
      [&](int i) { return index.bytes[i] & 0x80 ? 0 : a.bytes[i / 16 * 16 + (index.bytes[i] & 15)]; });
}

}  // namespace moepack::emulated

// name(a, b), name(a), name(a, n) and name(x): lane by lane.
#define MOEPACK_LANES2(name, Register, Lane, result)                                                    \
  inline Register name(Register first, Register second) {                                               \
    const auto as = moepack::emulated::lanes<Lane>(first), bs = moepack::emulated::lanes<Lane>(second); \
    return moepack::emulated::made<Lane, Register>([&](int i) {                                         \
      const Lane a = as.v[i], b = bs.v[i];                                                              \
      return result;                                                                                    \
    });                                                                                                 \
  }
#define MOEPACK_CONVERTED(name, Out, OutLane, In, InLane, result) \
  inline Out name(In first) {                                     \
    const auto as = moepack::emulated::lanes<InLane>(first);      \
    return moepack::emulated::made<OutLane, Out>([&](int i) {     \
      const InLane a = as.v[i];                                   \
      return result;                                              \
    });                                                           \
  }
#define MOEPACK_SHIFTED(name, Register, Lane, result)           \
  inline Register name(Register first, int n) {                 \
    const auto as = moepack::emulated::lanes<Lane>(first);      \
    return moepack::emulated::made<Lane, Register>([&](int i) { \
      const Lane a = as.v[i];                                   \
      return result;                                            \
    });                                                         \
  }
#define MOEPACK_SET1(name, Register, Lane)                                  \
  inline Register name(Lane x) {                                            \
    return moepack::emulated::made<Lane, Register>([=](int) { return x; }); \
  }
#define MOEPACK_CAST(name, Out, In) \
  inline Out name(In a) { return moepack::emulated::cast<Out>(a); }

#define MOEPACK_FLOATS(width, Register, Integers)                                                                    \
  MOEPACK_SET1(_mm##width##_set1_ps, Register, float)                                                                \
  MOEPACK_LANES2(_mm##width##_add_ps, Register, float, a + b)                                                        \
  MOEPACK_LANES2(_mm##width##_sub_ps, Register, float, a - b)                                                        \
  MOEPACK_LANES2(_mm##width##_mul_ps, Register, float, a* b)                                                         \
  MOEPACK_LANES2(_mm##width##_div_ps, Register, float, a / b)                                                        \
  MOEPACK_LANES2(_mm##width##_min_ps, Register, float, a < b ? a : b)                                                \
  MOEPACK_LANES2(_mm##width##_max_ps, Register, float, a > b ? a : b)                                                \
  MOEPACK_LANES2(_mm##width##_xor_ps, Register, std::uint32_t, a ^ b)                                                \
  MOEPACK_CAST(_mm##width##_castps_si##width, Integers, Register)                                                    \
  MOEPACK_CAST(_mm##width##_castsi##width##_ps, Register, Integers)                                                  \
  MOEPACK_CONVERTED(_mm##width##_cvtps_epi32, Integers, std::int32_t, Register, float, moepack::emulated::to_int(a)) \
  MOEPACK_CONVERTED(_mm##width##_cvtepi32_ps, Register, float, Integers, std::int32_t, static_cast<float>(a))        \
  inline Register _mm##width##_loadu_ps(const float* p) { return moepack::emulated::loaded<Register>(p); }           \
  inline void _mm##width##_storeu_ps(float* p, Register a) { std::memcpy(p, &a, sizeof a); }                         \
  inline Register _mm##width##_fmadd_ps(Register x, Register y, Register z) {                                        \
    const auto a = moepack::emulated::lanes<float>(x), b = moepack::emulated::lanes<float>(y),                       \
               c = moepack::emulated::lanes<float>(z);                                                               \
    return moepack::emulated::made<float, Register>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });  \
  }

#define MOEPACK_INTEGERS(prefix, width, Register)                                                            \
  MOEPACK_SET1(prefix##_set1_epi8, Register, std::int8_t)                                                    \
  MOEPACK_SET1(prefix##_set1_epi16, Register, std::int16_t)                                                  \
  MOEPACK_SET1(prefix##_set1_epi32, Register, std::int32_t)                                                  \
  MOEPACK_LANES2(prefix##_and_si##width, Register, std::uint8_t, a& b)                                       \
  MOEPACK_LANES2(prefix##_xor_si##width, Register, std::uint8_t, a ^ b)                                      \
  MOEPACK_LANES2(prefix##_add_epi32, Register, std::uint32_t, a + b)                                         \
  MOEPACK_LANES2(prefix##_max_epi32, Register, std::int32_t, a > b ? a : b)                                  \
  MOEPACK_SHIFTED(prefix##_slli_epi16, Register, std::uint16_t, a << n)                                      \
  MOEPACK_SHIFTED(prefix##_srli_epi16, Register, std::uint16_t, a >> n)                                      \
  MOEPACK_SHIFTED(prefix##_srai_epi16, Register, std::int16_t, a >> n)                                       \
  MOEPACK_SHIFTED(prefix##_srli_epi64, Register, std::uint64_t, a >> n)                                      \
  MOEPACK_SHIFTED(prefix##_slli_epi32, Register, std::uint32_t, a << n)                                      \
  inline Register prefix##_loadu_si##width(const void* p) { return moepack::emulated::loaded<Register>(p); } \
  inline void prefix##_storeu_si##width(void* p, Register a) { std::memcpy(p, &a, sizeof a); }               \
  inline Register prefix##_shuffle_epi8(Register a, Register index) {                                        \
    return moepack::emulated::shuffled_bytes(a, index);                                                      \
  }

MOEPACK_FLOATS(256, __m256, __m256i)
MOEPACK_FLOATS(512, __m512, __m512i)
MOEPACK_INTEGERS(_mm, 128, __m128i)
MOEPACK_INTEGERS(_mm256, 256, __m256i)
MOEPACK_INTEGERS(_mm512, 512, __m512i)
MOEPACK_SET1(_mm256_set1_epi64x, __m256i, std::int64_t)
MOEPACK_SET1(_mm512_set1_epi64, __m512i, std::int64_t)

inline void _mm_prefetch(const char*, int) {}

// Rounding and comparing: the one mode and the one predicate that are used.
inline __m256 _mm256_round_ps(__m256 a, int) {
  const auto x = moepack::emulated::lanes<float>(a);
  return moepack::emulated::made<float, __m256>([&](int i) { return __builtin_rintf(x.v[i]); });
}
inline __m512 _mm512_roundscale_ps(__m512 a, int) {
  const auto x = moepack::emulated::lanes<float>(a);
  return moepack::emulated::made<float, __m512>([&](int i) { return __builtin_rintf(x.v[i]); });
}
inline __m256 _mm256_cmp_ps(__m256 a, __m256 b, int) {
  const auto x = moepack::emulated::lanes<float>(a), y = moepack::emulated::lanes<float>(b);
  return moepack::emulated::made<std::uint32_t, __m256>([&](int i) { return x.v[i] < y.v[i] ? UINT32_MAX : 0; });
}
inline __m256 _mm256_blendv_ps(__m256 a, __m256 b, __m256 mask) {
  const auto x = moepack::emulated::lanes<std::uint32_t>(a), y = moepack::emulated::lanes<std::uint32_t>(b),
             m = moepack::emulated::lanes<std::uint32_t>(mask);
  return moepack::emulated::made<std::uint32_t, __m256>([&](int i) { return m.v[i] >> 31 ? y.v[i] : x.v[i]; });
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int) {
  const auto x = moepack::emulated::lanes<float>(a), y = moepack::emulated::lanes<float>(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(x.v[i] < y.v[i]) << i;
  return static_cast<__mmask16>(mask);
}
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  const auto x = moepack::emulated::lanes<std::uint32_t>(a), y = moepack::emulated::lanes<std::uint32_t>(b);
  return moepack::emulated::made<std::uint32_t, __m512>([&](int i) { return mask >> i & 1 ? y.v[i] : x.v[i]; });
}

inline __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) {
  return moepack::emulated::dpbusd(sum, a, b);
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) { return moepack::emulated::dpbusd(sum, a, b); }

inline __m256 _mm256_cvtph_ps(__m128i a) { return moepack::emulated::floats_of<__m256>(a); }
inline __m512 _mm512_cvtph_ps(__m256i a) { return moepack::emulated::floats_of<__m512>(a); }
inline __m128i _mm_setzero_si128() { return {}; }
inline __m128i _mm_setr_epi8(std::int8_t b0, std::int8_t b1, std::int8_t b2, std::int8_t b3, std::int8_t b4,
                             std::int8_t b5, std::int8_t b6, std::int8_t b7, std::int8_t b8, std::int8_t b9,
                             std::int8_t b10, std::int8_t b11, std::int8_t b12, std::int8_t b13, std::int8_t b14,
                             std::int8_t b15) {
  const std::int8_t bytes[] = {b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15};
  return moepack::emulated::loaded<__m128i>(bytes);
}
inline __m512i _mm512_setr_epi64(std::int64_t q0, std::int64_t q1, std::int64_t q2, std::int64_t q3, std::int64_t q4,
                                 std::int64_t q5, std::int64_t q6, std::int64_t q7) {
  const std::int64_t lanes[] = {q0, q1, q2, q3, q4, q5, q6, q7};
  return moepack::emulated::loaded<__m512i>(lanes);
}
inline __m128i _mm_loadl_epi64(const __m128i* p) {
  __m128i result = {};
  std::memcpy(&result, p, 8);
  return result;
}
inline __m256i _mm256_cvtepu8_epi16(__m128i a) { return moepack::emulated::widened<std::uint16_t, __m256i>(a); }
inline __m256i _mm256_cvtepu8_epi32(__m128i a) { return moepack::emulated::widened<std::uint32_t, __m256i>(a); }
inline __m512i _mm512_cvtepu8_epi32(__m128i a) { return moepack::emulated::widened<std::uint32_t, __m512i>(a); }
inline __m256i _mm256_broadcastsi128_si256(__m128i a) { return moepack::emulated::repeated<__m256i>(a); }
inline __m512i _mm512_broadcast_i32x4(__m128i a) { return moepack::emulated::repeated<__m512i>(a); }
MOEPACK_CAST(_mm256_castsi256_si128, __m128i, __m256i)
MOEPACK_CAST(_mm512_castsi512_si256, __m256i, __m512i)
inline __m128i _mm256_extracti128_si256(__m256i a, int half) {
  return moepack::emulated::loaded<__m128i>(a.bytes + 16 * half);
}

// Narrowing with saturation; of 256 bits, each half for itself.
inline __m256i _mm256_packs_epi32(__m256i a, __m256i b) {
  const auto x = moepack::emulated::lanes<std::int32_t>(a), y = moepack::emulated::lanes<std::int32_t>(b);
  return moepack::emulated::made<std::int16_t, __m256i>([&](int i) {
    const int from = i / 8 * 4 + i % 4;
    return moepack::emulated::saturate(i % 8 < 4 ? x.v[from] : y.v[from], INT16_MAX);
  });
}
inline __m128i _mm_packs_epi16(__m128i a, __m128i b) {
  const auto x = moepack::emulated::lanes<std::int16_t>(a), y = moepack::emulated::lanes<std::int16_t>(b);
  return moepack::emulated::made<std::int8_t, __m128i>(
      [&](int i) { return moepack::emulated::saturate(i < 8 ? x.v[i] : y.v[i - 8], INT8_MAX); });
}
inline __m128i _mm512_cvtsepi32_epi8(__m512i a) {
  const auto x = moepack::emulated::lanes<std::int32_t>(a);
  return moepack::emulated::made<std::int8_t, __m128i>(
      [&](int i) { return moepack::emulated::saturate(x.v[i], INT8_MAX); });
}

inline __m256i _mm256_permute4x64_epi64(__m256i a, int order) {
  const auto x = moepack::emulated::lanes<std::uint64_t>(a);
  return moepack::emulated::made<std::uint64_t, __m256i>([&](int i) { return x.v[order >> 2 * i & 3]; });
}
inline __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int order) {
  const auto x = moepack::emulated::lanes<std::uint32_t>(a), y = moepack::emulated::lanes<std::uint32_t>(b);
  return moepack::emulated::made<std::uint32_t, __m512>([&](int i) {
    const int from = i / 4 * 4 + (order >> 2 * (i % 4) & 3);
    return i % 4 < 2 ? x.v[from] : y.v[from];
  });
}
// Each half is one of the four halves of a and b; clearing one is not used.
inline __m256i _mm256_permute2x128_si256(__m256i a, __m256i b, int order) {
  return moepack::emulated::made<std::uint8_t, __m256i>([&](int i) {
    const int half = order >> 4 * (i / 16) & 3;
    return (half < 2 ? a : b).bytes[16 * (half % 2) + i % 16];
  });
}
// 128 bits at a time: two of a, then two of b.
inline __m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, int order) {
  return moepack::emulated::made<std::uint8_t, __m512i>(
      [&](int i) { return (i < 32 ? a : b).bytes[16 * (order >> 2 * (i / 16) & 3) + i % 16]; });
}
inline __m512i _mm512_castsi256_si512(__m256i a) {
  __m512i result = {};
  std::memcpy(&result, &a, sizeof a);
  return result;
}
inline __m512i _mm512_inserti64x4(__m512i a, __m256i b, int half) {
  std::memcpy(a.bytes + 32 * half, &b, sizeof b);
  return a;
}
inline __m512i _mm512_castsi128_si512(__m128i a) {
  __m512i result = {};
  std::memcpy(&result, &a, sizeof a);
  return result;
}
inline __m256i _mm512_extracti64x4_epi64(__m512i a, int half) {
  return moepack::emulated::loaded<__m256i>(a.bytes + 32 * half);
}
inline __m512i _mm512_permutexvar_epi64(__m512i index, __m512i a) {
  const auto from = moepack::emulated::lanes<std::uint64_t>(index), x = moepack::emulated::lanes<std::uint64_t>(a);
  return moepack::emulated::made<std::uint64_t, __m512i>([&](int i) { return x.v[from.v[i] & 7]; });
}
inline __m256i _mm512_cvtepi64_epi32(__m512i a) {
  const auto x = moepack::emulated::lanes<std::uint64_t>(a);
  return moepack::emulated::made<std::uint32_t, __m256i>([&](int i) { return x.v[i]; });
}
// Sums of neighbours, two of a and two of b in each half.
inline __m256i _mm256_hadd_epi32(__m256i a, __m256i b) {
  const auto x = moepack::emulated::lanes<std::uint32_t>(a), y = moepack::emulated::lanes<std::uint32_t>(b);
  return moepack::emulated::made<std::uint32_t, __m256i>([&](int i) {
    const auto& from = i % 4 < 2 ? x : y;
    const int at = i / 4 * 4 + 2 * (i % 2);
    return from.v[at] + from.v[at + 1];
  });
}
// Bytes of a and b in turn.
inline __m128i _mm_unpacklo_epi8(__m128i a, __m128i b) {
  return moepack::emulated::made<std::uint8_t, __m128i>([&](int i) { return (i % 2 ? b : a).bytes[i / 2]; });
}
inline __m128i _mm_unpackhi_epi8(__m128i a, __m128i b) {
  return moepack::emulated::made<std::uint8_t, __m128i>([&](int i) { return (i % 2 ? b : a).bytes[8 + i / 2]; });
}
inline __m128i _mm_shuffle_epi32(__m128i a, int order) {
  const auto x = moepack::emulated::lanes<std::uint32_t>(a);
  return moepack::emulated::made<std::uint32_t, __m128i>([&](int i) { return x.v[order >> 2 * i & 3]; });
}
inline std::int32_t _mm_cvtsi128_si32(__m128i a) { return moepack::emulated::lanes<std::int32_t>(a).v[0]; }
inline std::int32_t _mm512_reduce_max_epi32(__m512i a) {
  const auto x = moepack::emulated::lanes<std::int32_t>(a);
  std::int32_t most = x.v[0];
  for (const std::int32_t value : x.v) most = value > most ? value : most;
  return most;
}
