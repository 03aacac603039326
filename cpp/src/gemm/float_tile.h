// The tile of fp8 weights: M rows of fp32 activations against a panel of 16 columns.
//
//   acc = 0; per weight group of 128 k: four parts of 32 k, each part = fma(a[k], w[k], part) from 0 in ascending k;
//            acc = fma(((part0 + part1) + part2) + part3, w_scale, acc);  result = acc * panel.scale (+ bias)
//
// w[k] is the weight's value * 2^-8, which is what its bits, moved into an fp16, stand for.
#pragma once

#include "gemm/tile.h"

namespace moepack::gemm {

constexpr int kFloatGroup = 128;
constexpr int kFloatPart = 32;
constexpr int kFloatParts = kFloatGroup / kFloatPart;

// `Parts` neighbouring parts at once: with a single row, the additions of one part would wait for each other.
template <class I, int M, int Parts>
inline void float_parts(const std::uint8_t* w, const float* const* a, int k, typename I::Float (*part)[M]) {
  for (int p = 0; p < Parts; ++p)
    for (int i = 0; i < M; ++i) part[p][i] = I::broadcast(0.0f);
#pragma GCC unroll 4
  for (int j = 0; j < kFloatPart; ++j)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; ++p) {
      const int at = k + p * kFloatPart + j;
      const typename I::Float weights = I::load_fp8(w + at * kLanes);
      if (j % 4 == 0) I::prefetch(w + at * kLanes + kPrefetchBytes);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) part[p][i] = I::fma(I::broadcast(a[i][at]), weights, part[p][i]);
    }
}

template <class I, int M>
inline void float_group(const std::uint8_t* w, const float* const* a, typename I::Float* sum) {
  constexpr int at_once = M == 1 ? kFloatParts : 1;
  for (int first = 0; first < kFloatParts; first += at_once) {
    typename I::Float part[at_once][M];
    float_parts<I, M, at_once>(w, a, first * kFloatPart, part);
    for (int p = 0; p < at_once; ++p)
      for (int i = 0; i < M; ++i) sum[i] = first + p == 0 ? part[p][i] : I::add(sum[i], part[p][i]);
  }
}

template <class I>
struct FloatTile {
  static constexpr int rows = I::float_rows;

  template <int M>
  static inline void multiply(const Panel& panel, const Rows& rows, const std::int32_t* index, const float* bias,
                              float* out, std::int64_t out_stride) {
    const float* a[M];
    typename I::Float acc[M];
    for (int i = 0; i < M; ++i) {
      a[i] = rows.values + index[i] * rows.value_stride;
      acc[i] = I::broadcast(0.0f);
    }
    const std::uint8_t* w = panel.bytes;
    for (int g = 0; g < panel.groups; ++g) {
      typename I::Float sum[M];
      float_group<I, M>(w, a, sum);
      w += kFloatGroup * kLanes;
      const typename I::Float w_scale = SingleScales::load<I>(w);
      w += SingleScales::bytes;
      for (int i = 0; i < M; ++i) {
        acc[i] = I::fma(sum[i], w_scale, acc[i]);
        a[i] += kFloatGroup;
      }
    }
    for (int i = 0; i < M; ++i) {
      typename I::Float result = I::mul(acc[i], I::broadcast(panel.scale));
      if (bias) result = I::add(result, I::load(bias));
      I::store(out + i * out_stride, result);
    }
  }
};

}  // namespace moepack::gemm
