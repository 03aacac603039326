#include "moepack/quantize.h"

#include <algorithm>
#include <cmath>

#include "clones.h"
#include "half.h"
#include "minifloat.h"
#include "moepack/packed.h"

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

// Squared error of a group whose weights `decoded` gives back, in the order of packed-format.md.
template <class Decoded>
MOEPACK_INLINE float squared_error(const float* w, int group, Decoded decoded) {
  float t[kPartials] = {};
  for (int i = 0; i < group; i += kPartials)
    for (int l = 0; l < kPartials; ++l) {
      const float d = w[i + l] - decoded(w[i + l]);
      t[l] += d * d;
    }
  float u[4];
  for (int l = 0; l < 4; ++l) u[l] = t[l] + t[l + 4];
  return (u[0] + u[2]) + (u[1] + u[3]);
}

MOEPACK_INLINE float squared_error(const float* w, int group, float scale, float inverse, CodeRange range) {
  return squared_error(w, group, [=](float v) { return range.code(v, inverse) * scale; });
}

MOEPACK_INLINE float largest_magnitude(const float* w, int group) {
  float m = 0.0f;
  for (int i = 0; i < group; ++i) m = std::max(m, std::fabs(w[i]));
  return m;
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
  const float m = largest_magnitude(w, group);
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

// One group, padded with zeros, of a row: its scale and codes.
MOEPACK_INLINE void quantize_group(const Scheme& scheme, const float* w, std::uint16_t& scale, std::int8_t* codes) {
  const CodeRange range{static_cast<float>(scheme.code_min), static_cast<float>(scheme.code_max)};
  const float chosen = best_scale(scheme.cell, scheme.group, range, w);
  scale = half_from_float(chosen);
  const float inverse = chosen == 0.0f ? 0.0f : 1.0f / chosen;
  for (int i = 0; i < scheme.group; ++i) codes[i] = static_cast<std::int8_t>(range.code(w[i], inverse));
}

constexpr int kE8m0Bias = 127;

MOEPACK_INLINE float e2m1_rounded(float v) {
  const float m = std::fabs(v);
  // Steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6.
  const float rounded = m < 2.0f ? round_even(m * 2.0f) * 0.5f : m < 4.0f ? round_even(m) : round_even(m * 0.5f) * 2.0f;
  return std::copysign(std::min(rounded, kE2m1Max), v);
}

// e8m0: the largest power of two that leaves the largest weight below 8, where it may clip, or the next one.
MOEPACK_INLINE void quantize_group(const Scheme& scheme, const float* w, std::uint8_t& scale, std::int8_t* codes) {
  const float m = largest_magnitude(w, scheme.group);
  scale = 0;
  if (m == 0.0f) return static_cast<void>(std::fill_n(codes, scheme.group, std::int8_t{0}));
  const int exponent = std::clamp(std::ilogb(m) - 2, 1 - kE8m0Bias, kE8m0Bias - 1);
  float v[kMaxGroup];  // in units of the smaller scale: squares of huge and of tiny weights leave fp32
  const float inverse = std::ldexp(1.0f, -exponent);
  for (int i = 0; i < scheme.group; ++i) v[i] = w[i] * inverse;
  const float small = squared_error(v, scheme.group, [](float x) { return e2m1_rounded(x); });
  const float large = squared_error(v, scheme.group, [](float x) { return e2m1_rounded(x * 0.5f) * 2.0f; });
  const bool doubled = large < small;
  scale = static_cast<std::uint8_t>(exponent + doubled + kE8m0Bias);
  for (int i = 0; i < scheme.group; ++i) codes[i] = e2m1_from_float(v[i] * (doubled ? 0.5f : 1.0f));
}

// fp32: the largest weight becomes the largest code.
MOEPACK_INLINE void quantize_group(const Scheme& scheme, const float* w, float& scale, std::int8_t* codes) {
  const float m = largest_magnitude(w, scheme.group);
  scale = m == 0.0f ? 0.0f : std::max(m / kE4m3Max, 0x1p-126f);
  for (int i = 0; i < scheme.group; ++i) codes[i] = m == 0.0f ? std::int8_t{0} : e4m3_from_float(w[i] / scale);
}

template <class Scale>
MOEPACK_INLINE void quantize_row_of(const Scheme& scheme, const float* weights, std::int64_t cols, float shrink,
                                    std::int8_t* codes, Scale* scales) {
  for (std::int64_t begin = 0; begin < cols; begin += scheme.group) {
    const std::int64_t length = std::min<std::int64_t>(scheme.group, cols - begin);
    float w[kMaxGroup] = {};
    for (std::int64_t i = 0; i < length; ++i) w[i] = weights[begin + i] * shrink;
    std::int8_t group_codes[kMaxGroup];
    quantize_group(scheme, w, *scales++, group_codes);
    std::copy_n(group_codes, length, codes + begin);
  }
}

MOEPACK_CLONES void quantize_row(const Scheme& scheme, const float* weights, std::int64_t cols, float shrink,
                                 std::int8_t* codes, std::uint16_t* scales) {
  quantize_row_of(scheme, weights, cols, shrink, codes, scales);
}
MOEPACK_CLONES void quantize_row(const Scheme& scheme, const float* weights, std::int64_t cols, float shrink,
                                 std::int8_t* codes, std::uint8_t* scales) {
  quantize_row_of(scheme, weights, cols, shrink, codes, scales);
}
MOEPACK_CLONES void quantize_row(const Scheme& scheme, const float* weights, std::int64_t cols, float shrink,
                                 std::int8_t* codes, float* scales) {
  quantize_row_of(scheme, weights, cols, shrink, codes, scales);
}

// The largest |w|; not finite if any weight is not. As integers: their maximum has no order of operations to keep.
MOEPACK_CLONES float largest_magnitude_of(const float* w, std::int64_t count) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, bits_of(w[i]) & 0x7fffffffu);
  return float_from_bits(largest);
}

NonFinite first_non_finite(const float* row, std::int64_t r, std::int64_t cols) {
  const float* bad = std::find_if(row, row + cols, [](float w) { return !std::isfinite(w); });
  return {r, bad - row};
}

template <class Scale>
NonFinite quantize_rows(const Scheme& scheme, const float* weights, std::int64_t rows, std::int64_t cols, float shrink,
                        std::int8_t* codes, Scale* scales) {
  const std::int64_t groups = ceil_div(cols, scheme.group);
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = weights + r * cols;
    if (!std::isfinite(largest_magnitude_of(row, cols))) return first_non_finite(row, r, cols);
    quantize_row(scheme, row, cols, shrink, codes + r * cols, scales + r * groups);
  }
  return {};
}

}  // namespace

std::int32_t scale_exponent(const Scheme& scheme, const float* weights, std::int64_t count) {
  if (cell_info(scheme.cell).scale != ScaleType::fp16) return 0;
  const float amax = largest_magnitude_of(weights, count);
  if (amax == 0.0f || !std::isfinite(amax)) return 0;
  return std::max(std::ilogb(amax) - 14, -126);
}

NonFinite quantize_search(const Scheme& scheme, const float* weights, std::int64_t rows, std::int64_t cols,
                          std::int32_t exponent, std::int8_t* codes, void* scales) {
  const float shrink = std::ldexp(1.0f, -exponent);
  switch (cell_info(scheme.cell).scale) {
    case ScaleType::fp16:
      return quantize_rows(scheme, weights, rows, cols, shrink, codes, static_cast<std::uint16_t*>(scales));
    case ScaleType::e8m0:
      return quantize_rows(scheme, weights, rows, cols, shrink, codes, static_cast<std::uint8_t*>(scales));
    case ScaleType::fp32:
      return quantize_rows(scheme, weights, rows, cols, shrink, codes, static_cast<float*>(scales));
  }
  return {};
}

}  // namespace moepack
