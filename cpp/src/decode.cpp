#include "moepack/decode.h"

#include <algorithm>

#include "moepack/packed.h"

namespace moepack {
namespace {

template <int per_byte>
void decode_bytes(const float* table, const std::uint8_t* bytes, std::int64_t count, float factor, float* weights) {
  for (std::int64_t i = 0; i < count; ++i)
    for (int j = 0; j < per_byte; ++j) weights[per_byte * i + j] = table[per_byte * bytes[i] + j] * factor;
}

template <int per_byte>
void decode_rows(const float* table, const std::uint8_t* bytes, std::int64_t rows, std::int64_t cols,
                 BlockFactors factors, float* weights) {
  const std::int64_t blocks = ceil_div(cols, factors.block_cols);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t first = b * factors.block_cols, last = std::min(cols, first + factors.block_cols);
      decode_bytes<per_byte>(table, bytes + (r * cols + first) / per_byte, (last - first) / per_byte,
                             factors.values[r / factors.block_rows * blocks + b], weights + r * cols + first);
    }
}

}  // namespace

void decode(ByteValues table, const std::uint8_t* bytes, std::int64_t rows, std::int64_t cols, BlockFactors factors,
            float* weights) {
  if (table.per_byte == 1) return decode_rows<1>(table.values, bytes, rows, cols, factors, weights);
  decode_rows<2>(table.values, bytes, rows, cols, factors, weights);
}

}  // namespace moepack
