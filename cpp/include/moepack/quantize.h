// Float weights -> codes and scales.
#pragma once

#include <cstdint>

#include "moepack/scheme.h"

namespace moepack {

struct NonFinite {
  std::int64_t row = -1;  // -1: all weights are finite
  std::int64_t col = -1;
};

// The power of two by which all scales of a matrix are divided before they are rounded to fp16, so that neither tiny
// nor huge experts leave fp16's normal range: floor(log2(amax)) - 14, or 0 for a zero matrix. 0 where scales are not
// fp16: they reach as far as fp32.
std::int32_t scale_exponent(const Scheme& scheme, const float* weights, std::int64_t count);

// Least-squares search: for every group the scale among a fixed set of candidates that gives the smallest squared
// error; docs/reference/packed-format.md lists the candidates and the order of the sums.
// weights [rows, cols] -> codes [rows, cols], scales [rows, ceil(cols/group)] in the cell's type.
NonFinite quantize_search(const Scheme& scheme, const float* weights, std::int64_t rows, std::int64_t cols,
                          std::int32_t exponent, std::int8_t* codes, void* scales);

}  // namespace moepack
