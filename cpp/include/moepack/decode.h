// The weights that a quantized checkpoint holds: small codes, and a factor for each block of them.
#pragma once

#include <cstdint>

namespace moepack {

// A grid of factors, [ceil(rows / block_rows), ceil(cols / block_cols)] of a matrix [rows, cols]; the last blocks are
// cut off.
struct BlockFactors {
  const float* values;
  std::int64_t block_rows, block_cols;
};

// What a byte stands for: one value, or two that follow each other along a row.
struct ByteValues {
  const float* values;  // [256, per_byte]
  int per_byte;
};

// bytes [rows, cols / per_byte] -> weights [rows, cols] = value * factor, rounded once. A block's columns are whole
// bytes.
void decode(ByteValues table, const std::uint8_t* bytes, std::int64_t rows, std::int64_t cols, BlockFactors factors,
            float* weights);

}  // namespace moepack
