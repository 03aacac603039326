#include "moepack/decode.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "made.h"
#include "moepack/packed.h"

namespace moepack {
namespace {

std::vector<float> table(int per_byte) {
  std::vector<float> values = made::Random(1).floats(static_cast<std::size_t>(256 * per_byte));
  values[0] = made::kNaN;
  return values;
}

bool are_same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

TEST(Decode, EveryByteByTheFactorOfItsBlock) {
  for (const int per_byte : {1, 2})
    for (const std::int64_t rows : {1, 5})
      for (const std::int64_t bytes_per_row : {1, 13, 40})
        for (const std::int64_t block_rows : {std::int64_t{1}, std::int64_t{2}, rows})
          for (const std::int64_t block_cols : {std::int64_t{2}, std::int64_t{6}, bytes_per_row * per_byte}) {
            const std::int64_t cols = bytes_per_row * per_byte, blocks = ceil_div(cols, block_cols);
            const std::vector<float> values = table(per_byte);
            const std::vector<float> factors =
                made::Random(2).floats(static_cast<std::size_t>(ceil_div(rows, block_rows) * blocks));
            std::vector<std::uint8_t> bytes;
            for (std::int64_t i = 0; i < rows * bytes_per_row; ++i) bytes.push_back(static_cast<std::uint8_t>(37 * i));
            std::vector<float> weights(static_cast<std::size_t>(rows * cols));
            decode({values.data(), per_byte}, bytes.data(), rows, cols, {factors.data(), block_rows, block_cols},
                   weights.data());
            for (std::int64_t r = 0; r < rows; ++r)
              for (std::int64_t c = 0; c < cols; ++c)
                EXPECT_TRUE(
                    are_same(weights[r * cols + c], values[per_byte * bytes[(r * cols + c) / per_byte] + c % per_byte] *
                                                        factors[r / block_rows * blocks + c / block_cols]))
                    << r << " " << c;
          }
}

}  // namespace
}  // namespace moepack
