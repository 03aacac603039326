#include "moepack/quantize.h"

#include <algorithm>
#include <cmath>

#include "half.h"
#include "moepack/packed.h"

// Same source, same order of operations, wider registers where the CPU has them: the bytes stay the same.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define MOEPACK_CLONES [[gnu::target_clones("avx2", "default")]]
#define MOEPACK_INLINE [[gnu::always_inline]] inline
#else
#define MOEPACK_CLONES
#define MOEPACK_INLINE inline
#endif

namespace moepack {
namespace {

constexpr int kCandidates = 17;
constexpr int kMaxGroup = 128;
constexpr int kPartials = 8;

// Adding and subtracting 1.5 * 2^23 rounds half to even, for |x| < 2^22, without a call to rint.
MOEPACK_INLINE float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

struct CodeRange {
  float min, max;
  MOEPACK_INLINE float code(float w, float inverse) const {
    return std::min(std::max(round_even(w * inverse), min), max);
  }
};

// Squared error of the group under one scale.
MOEPACK_INLINE float squared_error(const float* w, int group, float scale, float inverse, CodeRange range) {
  float t[kPartials] = {};
  for (int i = 0; i < group; i += kPartials)
    for (int l = 0; l < kPartials; ++l) {
      const float d = w[i + l] - range.code(w[i + l], inverse) * scale;
      t[l] += d * d;
    }
  float u[4];
  for (int l = 0; l < 4; ++l) u[l] = t[l] + t[l + 4];
  return (u[0] + u[2]) + (u[1] + u[3]);
}

// The positive candidates of a group whose largest |w| is m: m / divisor, rounded to fp16 but kept in fp32. The
// divisors of packed-format.md lie around the largest code, from no clipping at all to clipping the extremes.
MOEPACK_INLINE void positive_candidates(Cell cell, float m, float* scales) {
  const float first = cell == Cell::int4 ? 5.0f : 124.0f, step = cell == Cell::int4 ? 0.25f : 0.5f;
  for (int j = 0; j < kCandidates; ++j) {
    const float exact = m / (first + step * static_cast<float>(j));
    const std::uint32_t bits = bits_of(exact);
    const float normal = float_from_bits((bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu);
    const float subnormal = (exact + 0.5f) - 0.5f;  // a float near 0.5 has the step of fp16's subnormals
    scales[j] = exact < 0x1p-14f ? subnormal : normal;
  }
}

// The best scale of a group, an fp16 number; 0 for a group without any.
MOEPACK_INLINE float best_scale(Cell cell, int group, CodeRange range, const float* w) {
  float m = 0.0f;
  for (int i = 0; i < group; ++i) m = std::max(m, std::fabs(w[i]));
  if (m == 0.0f) return 0.0f;
  float positive[kCandidates];
  positive_candidates(cell, m, positive);
  // All errors first, then the smallest: which candidate wins is not predictable, so no branch may depend on it.
  float scales[2 * kCandidates], errors[2 * kCandidates];
  int count = 0;
  for (const float scale : positive) {
    if (scale == 0.0f) continue;
    const float inverse = 1.0f / scale;
    scales[count] = scale;
    errors[count++] = squared_error(w, group, scale, inverse, range);
    // The two signs differ only where the largest code is out of reach on one side.
    if (cell != Cell::int4 || round_even(m * inverse) <= range.max) continue;
    scales[count] = -scale;
    errors[count++] = squared_error(w, group, -scale, -inverse, range);
  }
  return count == 0 ? 0.0f : scales[std::min_element(errors, errors + count) - errors];
}

MOEPACK_CLONES void quantize_row(const Scheme& scheme, const float* weights, std::int64_t cols, float shrink,
                                 std::int8_t* codes, std::uint16_t* scales) {
  const CodeRange range{static_cast<float>(scheme.code_min), static_cast<float>(scheme.code_max)};
  for (std::int64_t begin = 0; begin < cols; begin += scheme.group) {
    const int length = static_cast<int>(std::min<std::int64_t>(scheme.group, cols - begin));
    float w[kMaxGroup] = {};
    for (int i = 0; i < length; ++i) w[i] = weights[begin + i] * shrink;
    const float scale = best_scale(scheme.cell, scheme.group, range, w);
    *scales++ = half_from_float(scale);
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (int i = 0; i < length; ++i) codes[begin + i] = static_cast<std::int8_t>(range.code(w[i], inverse));
  }
}

NonFinite first_non_finite(const float* weights, std::int64_t rows, std::int64_t cols) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c)
      if (!std::isfinite(weights[r * cols + c])) return {r, c};
  return {};
}

}  // namespace

std::int32_t scale_exponent(const float* weights, std::int64_t count) {
  float amax = 0.0f;
  for (std::int64_t i = 0; i < count; ++i) amax = std::max(amax, std::fabs(weights[i]));
  if (amax == 0.0f) return 0;
  return std::max(std::ilogb(amax) - 14, -126);
}

NonFinite quantize_search(const Scheme& scheme, const float* weights, std::int64_t rows, std::int64_t cols,
                          std::int32_t exponent, std::int8_t* codes, std::uint16_t* scales) {
  const NonFinite bad = first_non_finite(weights, rows, cols);
  if (bad.row >= 0) return bad;
  const float shrink = std::ldexp(1.0f, -exponent);
  const std::int64_t groups = ceil_div(cols, scheme.group);
  for (std::int64_t r = 0; r < rows; ++r)
    quantize_row(scheme, weights + r * cols, cols, shrink, codes + r * cols, scales + r * groups);
  return {};
}

}  // namespace moepack
