// Codes and scales against the weights that they stand for.
#pragma once

#include <cstdint>

#include "moepack/scheme.h"

namespace moepack {

// Sums of squares over a matrix: of its weights, and of weight - value * scale * 2^exponent.
struct Squares {
  double weights = 0.0, errors = 0.0;
};

// weights, codes [rows, cols], scales [rows, ceil(cols / group)] in the cell's type. A row is summed in fp32, in units
// of its largest scale, rows in double: squares of faint weights do not vanish.
Squares compare(const Scheme& scheme, const float* weights, std::int64_t rows, std::int64_t cols,
                const std::int8_t* codes, const void* scales, std::int32_t exponent);

}  // namespace moepack
