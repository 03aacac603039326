// torchao's universal layout turned into panels: codes stay codes, in the order that the tile reads.
//
// A group of an 8-row panel there is group/8 pieces of 8 rows x 8 k, then 8 fp32 scales and 8 sums of codes. A 4-bit
// piece takes 32 bytes; its bytes 8i .. 8i+7, i = 0..3, hold 8 k of row {0, 1, 4, 5}[i] in their low and of the row two
// below it in their high nibbles. An 8-bit piece is 8 rows of 8 bytes.
#pragma once

#include "gemm/kernel.h"

namespace moepack::gemm {

constexpr int kUniversalRows = 8;

template <class I>
inline void prefetch_universal(const std::uint8_t* p) {
  constexpr int ahead = 2048;
  I::prefetch(p + ahead);
}

// Scales of 8 columns; the sums behind them are not needed where activations are symmetric.
inline const std::uint8_t* copy_universal_scales(const std::uint8_t* in, std::uint8_t* out) {
  __builtin_memcpy(out, in, 4 * kUniversalRows);
  return in + 8 * kUniversalRows;
}

template <class I>
void decode_universal4(const std::uint8_t* first, const std::uint8_t* second, int groups, int group,
                       std::uint8_t* panel) {
  for (int g = 0; g < groups; ++g, panel += 4 * kLanes) {
    for (int k = 0; k < group; k += 8, first += 32, second += 32, panel += 64) {
      prefetch_universal<I>(first);
      prefetch_universal<I>(second);
      I::universal_nibbles(first, panel);
      I::universal_nibbles(second, panel + 32);
    }
    first = copy_universal_scales(first, panel);
    second = copy_universal_scales(second, panel + 32);
  }
}

template <class I>
void decode_universal8(const std::uint8_t* first, const std::uint8_t* second, int groups, int group,
                       std::uint8_t* panel) {
  for (int g = 0; g < groups; ++g, panel += 4 * kLanes) {
    for (int k = 0; k < group; k += 8, first += 64, second += 64, panel += 128) {
      prefetch_universal<I>(first);
      prefetch_universal<I>(second);
      I::universal_bytes(first, panel, panel + 64);
      I::universal_bytes(second, panel + 32, panel + 96);
    }
    first = copy_universal_scales(first, panel);
    second = copy_universal_scales(second, panel + 32);
  }
}

}  // namespace moepack::gemm
