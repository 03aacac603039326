#include "moepack/compare.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "clones.h"
#include "half.h"
#include "minifloat.h"
#include "moepack/packed.h"

namespace moepack {
namespace {

constexpr int kChunk = 32;  // divides every group
constexpr int kPartials = 8;

// What codes stand for, in units of their scale.
struct IntegerValues {
  MOEPACK_INLINE float operator()(std::int8_t code) const { return static_cast<float>(code); }
};

struct MinifloatValues {
  std::array<float, 256> values{};

  explicit MinifloatValues(Cell cell) {
    for (int i = 0; i < 256; ++i) {
      const auto code = static_cast<std::uint8_t>(i);
      values[static_cast<std::size_t>(i)] = cell == Cell::mxfp4 ? e2m1_value(code) : e4m3_value(code);
    }
  }
  MOEPACK_INLINE float operator()(std::int8_t code) const { return values[static_cast<std::uint8_t>(code)]; }
};

MOEPACK_INLINE float scale_value(ScaleType type, const void* scales, std::int64_t i) {
  switch (type) {
    case ScaleType::fp16:
      return float_from_half(static_cast<const std::uint16_t*>(scales)[i]);
    case ScaleType::e8m0:
      return float_from_bits(static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(scales)[i]) << 23);
    case ScaleType::fp32:
      break;
  }
  return static_cast<const float*>(scales)[i];
}

// The scales of a row in units of 2^exponent, a power of two near the largest of them.
class RowScales {
 public:
  RowScales(ScaleType type, const void* scales, std::int64_t first, std::int64_t groups, std::int32_t matrix_exponent)
      : type_(type), scales_(scales), first_(first) {
    float largest = 0.0f;
    for (std::int64_t g = 0; g < groups; ++g)
      largest = std::max(largest, std::fabs(scale_value(type, scales, first + g)));
    exponent_ = largest == 0.0f ? 0 : std::max(matrix_exponent + std::ilogb(largest), -126);
    const int shift = matrix_exponent - exponent_;
    factor_ = std::ldexp(1.0f, shift / 2);
    rest_ = std::ldexp(1.0f, shift - shift / 2);
  }

  int exponent() const { return exponent_; }
  MOEPACK_INLINE float operator[](std::int64_t g) const {
    return scale_value(type_, scales_, first_ + g) * factor_ * rest_;
  }

 private:
  ScaleType type_;
  const void* scales_;
  std::int64_t first_;
  int exponent_;
  float factor_, rest_;  // of 2^shift, which one float may not hold
};

// Weights of one group, padded with zeros, and the difference to what their codes stand for.
struct Chunk {
  float weights[kChunk], errors[kChunk];

  template <class Values>
  MOEPACK_INLINE Chunk(const float* w, const std::int8_t* codes, int length, float scale, float unit,
                       const Values& value) {
    for (int i = 0; i < length; ++i) errors[i] = value(codes[i]) * scale;
    for (int i = 0; i < length; ++i) {
      weights[i] = w[i] * unit;
      errors[i] = weights[i] - errors[i];
    }
    for (int i = length; i < kChunk; ++i) weights[i] = errors[i] = 0.0f;
  }
};

struct Partials {
  float weights[kPartials] = {}, errors[kPartials] = {};

  MOEPACK_INLINE void add(const Chunk& chunk) {
    for (int i = 0; i < kChunk; i += kPartials)
      for (int l = 0; l < kPartials; ++l) {
        weights[l] += chunk.weights[i + l] * chunk.weights[i + l];
        errors[l] += chunk.errors[i + l] * chunk.errors[i + l];
      }
  }
};

template <class Values>
MOEPACK_INLINE Squares compare_row_of(const float* w, const std::int8_t* codes, std::int64_t cols,
                                      const RowScales& scales, int group, const Values& values) {
  const float unit = std::ldexp(1.0f, -scales.exponent());
  Partials sums;
  for (std::int64_t k = 0; k < cols; k += kChunk) {
    const float scale = scales[k / group];
    if (cols - k >= kChunk)  // a length that the compiler knows
      sums.add(Chunk(w + k, codes + k, kChunk, scale, unit, values));
    else
      sums.add(Chunk(w + k, codes + k, static_cast<int>(cols - k), scale, unit, values));
  }
  Squares row;
  for (int l = 0; l < kPartials; ++l) {
    row.weights += sums.weights[l];
    row.errors += sums.errors[l];
  }
  return row;
}

MOEPACK_CLONES Squares compare_row(const float* w, const std::int8_t* codes, std::int64_t cols, const RowScales& scales,
                                   int group, const IntegerValues& values) {
  return compare_row_of(w, codes, cols, scales, group, values);
}
MOEPACK_CLONES Squares compare_row(const float* w, const std::int8_t* codes, std::int64_t cols, const RowScales& scales,
                                   int group, const MinifloatValues& values) {
  return compare_row_of(w, codes, cols, scales, group, values);
}

template <class Values>
Squares compare_rows(const Scheme& scheme, const float* weights, std::int64_t rows, std::int64_t cols,
                     const std::int8_t* codes, const void* scales, std::int32_t exponent, const Values& values) {
  const std::int64_t groups = ceil_div(cols, scheme.group);
  Squares sum;
  for (std::int64_t r = 0; r < rows; ++r) {
    const RowScales row_scales(cell_info(scheme.cell).scale, scales, r * groups, groups, exponent);
    const Squares row = compare_row(weights + r * cols, codes + r * cols, cols, row_scales, scheme.group, values);
    sum.weights += std::ldexp(row.weights, 2 * row_scales.exponent());
    sum.errors += std::ldexp(row.errors, 2 * row_scales.exponent());
  }
  return sum;
}

}  // namespace

Squares compare(const Scheme& scheme, const float* weights, std::int64_t rows, std::int64_t cols,
                const std::int8_t* codes, const void* scales, std::int32_t exponent) {
  if (scheme.cell == Cell::int4 || scheme.cell == Cell::int8)
    return compare_rows(scheme, weights, rows, cols, codes, scales, exponent, IntegerValues{});
  return compare_rows(scheme, weights, rows, cols, codes, scales, exponent, MinifloatValues(scheme.cell));
}

}  // namespace moepack
