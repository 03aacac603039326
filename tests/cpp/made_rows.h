// Rows of quantized activations as a kernel takes them, with the plain ones that they were made of.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "gemm/kernel.h"
#include "made.h"
#include "plain.h"

namespace moepack::made {

struct Activations {
  Activations(const std::vector<plain::Quantized>& from, std::int64_t cols, int group) : quantized(from) {
    const std::int64_t padded = round_up(cols, group);
    for (const plain::Quantized& q : quantized) {
      std::vector<std::int8_t> own = q.codes;
      own.resize(static_cast<std::size_t>(padded), 0);
      codes.insert(codes.end(), own.begin(), own.end());
      scales.insert(scales.end(), q.scales.begin(), q.scales.end());
      for (std::int64_t g = 0; g < padded; g += group)
        offsets.push_back(-8 * std::accumulate(own.begin() + g, own.begin() + g + group, 0));
    }
    rows = {codes.data(), scales.data(), offsets.data(), padded, ceil_div(cols, 128), padded / group, nullptr, 0};
  }
  Activations(const Activations&) = delete;

  std::vector<plain::Quantized> quantized;
  std::vector<std::int8_t> codes;
  std::vector<float> scales;
  std::vector<std::int32_t> offsets;
  gemm::Rows rows;
};

inline std::vector<plain::Quantized> random_rows(int count, std::int64_t cols, std::uint32_t seed) {
  Random random(seed);
  std::vector<plain::Quantized> rows;
  for (int r = 0; r < count; ++r) rows.push_back(plain::quantize(random.floats(cols)));
  return rows;
}

inline std::vector<std::int32_t> all_rows(int count) {
  std::vector<std::int32_t> index(static_cast<std::size_t>(count));
  std::iota(index.begin(), index.end(), 0);
  return index;
}

}  // namespace moepack::made
