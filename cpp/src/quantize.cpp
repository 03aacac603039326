#include "moepack/quantize.h"

#include <algorithm>
#include <cmath>

#include "half.h"
#include "moepack/packed.h"

// Same source, same order of operations, wider registers where the CPU has them: the bytes stay the same.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define MOEPACK_CLONES [[gnu::target_clones("avx2", "default")]]
#else
#define MOEPACK_CLONES
#endif

namespace moepack {
namespace {

constexpr int kCandidates = 17;
constexpr int kMaxGroup = 128;
constexpr int kPartials = 8;

// Adding and subtracting 1.5 * 2^23 rounds half to even, for |x| < 2^22, without a call to rint.
inline float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

// Squared error of the group under one scale.
MOEPACK_CLONES float squared_error(const float* w, int group, float scale, float code_min, float code_max) {
  const float inverse = 1.0f / scale;
  float t[kPartials] = {};
  for (int i = 0; i < group; i += kPartials)
    for (int l = 0; l < kPartials; ++l) {
      const float code = std::min(std::max(round_even(w[i + l] * inverse), code_min), code_max);
      const float d = w[i + l] - code * scale;
      t[l] += d * d;
    }
  return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}

// The divisors of packed-format.md: around the largest code, from no clipping at all to clipping the extremes.
float divisor(const Scheme& scheme, int j) {
  return scheme.cell == Cell::int4 ? 5.0f + 0.25f * static_cast<float>(j) : 124.0f + 0.5f * static_cast<float>(j);
}

// The fp16 bits of the best scale of a group, 0 for a group without any.
std::uint16_t best_scale(const Scheme& scheme, const float* w) {
  float m = 0.0f;
  for (int i = 0; i < scheme.group; ++i) m = std::max(m, std::fabs(w[i]));
  if (m == 0.0f) return 0;
  const float code_min = static_cast<float>(scheme.code_min), code_max = static_cast<float>(scheme.code_max);
  const int signs = scheme.code_min == -scheme.code_max ? 1 : 2;
  std::uint16_t best = 0;
  float best_error = INFINITY;
  for (int j = 0; j < kCandidates; ++j)
    for (int s = 0; s < signs; ++s) {
      const std::uint16_t bits = half_from_float(m / divisor(scheme, j)) | static_cast<std::uint16_t>(s << 15);
      if ((bits & 0x7fff) == 0) continue;
      const float error = squared_error(w, scheme.group, float_from_half(bits), code_min, code_max);
      if (error < best_error) {
        best_error = error;
        best = bits;
      }
    }
  return best;
}

void quantize_row(const Scheme& scheme, const float* weights, std::int64_t cols, float shrink, std::int8_t* codes,
                  std::uint16_t* scales) {
  const float code_min = static_cast<float>(scheme.code_min), code_max = static_cast<float>(scheme.code_max);
  for (std::int64_t begin = 0; begin < cols; begin += scheme.group) {
    const int length = static_cast<int>(std::min<std::int64_t>(scheme.group, cols - begin));
    float w[kMaxGroup] = {};
    for (int i = 0; i < length; ++i) w[i] = weights[begin + i] * shrink;
    const std::uint16_t bits = best_scale(scheme, w);
    *scales++ = bits;
    const float inverse = bits ? 1.0f / float_from_half(bits) : 0.0f;
    for (int i = 0; i < length; ++i)
      codes[begin + i] = static_cast<std::int8_t>(std::min(std::max(round_even(w[i] * inverse), code_min), code_max));
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
