// The one tile body: M rows of quantized activations against a panel of 16 columns, or of 8 (universal.h).
//
//   acc = 0; per activation group: inner = 0; per weight group: inner = fma(float(idot), w_scale, inner);
//            acc = fma(inner, a_scale, acc);  result = acc * 2^exponent (+ bias)
//
// An instruction set `I` provides vectors of 16 lanes and the integer dot products; see isa/scalar.cpp for all of it in
// plain C++. One that multiplies several rows at once brings whole blocks of its own (isa/neoni8mm.cpp).
#pragma once

#include "gemm/kernel.h"

namespace moepack::gemm {

// Adds `Cells` cells of nibbles, 8 k each, to the sums of M rows. Meanwhile the sums stay in I::Partial.
template <class I, int M, int Cells, class Load>
inline void add_nibbles(const std::uint8_t* cells, const std::int8_t* const* a, int k, typename I::Int* sum,
                        Load load) {
  typename I::Partial partial[M];
  for (int i = 0; i < M; ++i) partial[i] = I::begin(sum[i]);
#pragma GCC unroll 4
  for (int c = 0; c < Cells; ++c) {
    const auto weights = load(cells + 64 * c);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) I::mac(partial[i], weights, a[i] + k + 8 * c);
  }
  for (int i = 0; i < M; ++i) sum[i] = I::end(partial[i], sum[i]);
}

// A cell says how many bytes a block of 32 k takes, where those of a panel begin, and in which vectors it is summed.
struct PackedCell {
  template <class I>
  using Vector = I;
  static const std::uint8_t* begin(const Panel& panel) { return panel.bytes; }
};

// 16 columns x 8 k per 64 bytes. Sums of 32 k fit I::Partial (int16 where that is exact).
struct Int4Cell : PackedCell {
  static constexpr int block_bytes = 256;

  template <class I, int M>
  static inline void block(const std::uint8_t* cells, const std::int8_t* const* a, typename I::Int* sum) {
    if constexpr (M > 1 && requires { I::template int4_block<M>(cells, a, sum); })
      return I::template int4_block<M>(cells, a, sum);
    add_nibbles<I, M, 4>(cells, a, 0, sum, [](const std::uint8_t* cell) { return I::nibbles(cell); });
  }

  template <class I>
  static inline typename I::Int start(std::int32_t offset) {
    return I::broadcast_int(offset);
  }
};

// 16 columns x 4 k per 64 bytes, signed.
struct Int8Cell : PackedCell {
  static constexpr int block_bytes = 512;

  template <class I, int M>
  static inline void block(const std::uint8_t* cells, const std::int8_t* const* a, typename I::Int* sum) {
    if constexpr (M > 1 && requires { I::template int8_block<M>(cells, a, sum); })
      return I::template int8_block<M>(cells, a, sum);
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      const auto weights = I::bytes(cells + 64 * c);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) I::mac(sum[i], weights, a[i] + 4 * c);
    }
  }

  template <class I>
  static inline typename I::Int start(std::int32_t offset) {
    return I::start_int8(offset);
  }
};

// e2m1: a nibble stands for twice its value plus 12, 0 .. 24. Sums of 16 k fit I::Partial.
struct Mxfp4Cell : PackedCell {
  static constexpr int block_bytes = 256;

  template <class I, int M>
  static inline void block(const std::uint8_t* cells, const std::int8_t* const* a, typename I::Int* sum) {
    if constexpr (M > 1 && requires { I::template mxfp4_block<M>(cells, a, sum); })
      return I::template mxfp4_block<M>(cells, a, sum);
    const auto load = [](const std::uint8_t* cell) { return I::mxfp4(cell); };
    add_nibbles<I, M, 2>(cells, a, 0, sum, load);
    add_nibbles<I, M, 2>(cells + 128, a, 16, sum, load);
  }

  // -8 * sum becomes -12 * sum.
  template <class I>
  static inline typename I::Int start(std::int32_t offset) {
    return I::broadcast_int(offset + offset / 2);
  }
};

// A group's scales behind its cells: fp16, the exponents of powers of two, or fp32.
struct HalfScales {
  static constexpr int bytes = 2 * kLanes;
  template <class I>
  static inline typename I::Float load(const std::uint8_t* p) {
    return I::load_half(p);
  }
};

struct E8m0Scales {
  static constexpr int bytes = kLanes;
  template <class I>
  static inline typename I::Float load(const std::uint8_t* p) {
    return I::load_e8m0(p);
  }
};

struct SingleScales {
  static constexpr int bytes = 4 * kLanes;
  template <class I, class Place>
  static inline typename I::Float load(const Place& p) {
    return I::load_single(p);
  }
};

// Asks for the lines that will be in use kPrefetchBytes from now.
template <class I, int Lines>
inline void prefetch(const std::uint8_t* w) {
  for (int line = 0; line < Lines; ++line) I::prefetch(w + kPrefetchBytes + 64 * line);
}

// Blocks: blocks of 32 k per weight group.
template <class I, class Cell, class Scales, int Blocks>
struct CodeTile {
  using V = typename Cell::template Vector<I>;
  static constexpr int rows = I::tile_rows;

  template <int M>
  static inline void multiply(const Panel& panel, const Rows& rows, const std::int32_t* index, const float* bias,
                              float* out, std::int64_t out_stride) {
    constexpr int groups_per_activation = kActivationGroup / (32 * Blocks);
    const std::int8_t* a[M];
    const float* a_scale[M];
    const std::int32_t* offset[M];
    typename V::Float acc[M];
    for (int i = 0; i < M; ++i) {
      a[i] = rows.codes + index[i] * rows.code_stride;
      a_scale[i] = rows.scales + index[i] * rows.scale_stride;
      offset[i] = rows.offsets + index[i] * rows.offset_stride;
      acc[i] = V::broadcast(0.0f);
    }
    auto w = Cell::begin(panel);
    for (int first = 0; first < panel.groups; first += groups_per_activation) {
      const int last = first + groups_per_activation < panel.groups ? first + groups_per_activation : panel.groups;
      typename V::Float inner[M];
      for (int i = 0; i < M; ++i) inner[i] = V::broadcast(0.0f);
      for (int g = first; g < last; ++g) {
        typename V::Int sum[M];
        for (int i = 0; i < M; ++i) sum[i] = Cell::template start<V>(offset[i][g]);
#pragma GCC unroll 1
        for (int b = 0; b < Blocks; ++b, w += Cell::block_bytes) {
          prefetch<I, Cell::block_bytes / 64>(w);
          Cell::template block<V, M>(w, a, sum);
          for (int i = 0; i < M; ++i) a[i] += 32;
        }
        prefetch<I, 1>(w);
        const typename V::Float w_scale = Scales::template load<V>(w);
        w += Scales::bytes;
        for (int i = 0; i < M; ++i) inner[i] = V::fma(V::to_float(sum[i]), w_scale, inner[i]);
      }
      for (int i = 0; i < M; ++i) acc[i] = V::fma(inner[i], V::broadcast(*a_scale[i]++), acc[i]);
    }
    for (int i = 0; i < M; ++i) {
      typename V::Float result = V::mul(acc[i], V::broadcast(panel.scale));
      if (bias) result = V::add(result, V::load(bias));
      V::store(out + i * out_stride, result);
    }
  }
};

// The last rows, fewer than a tile takes.
template <class Tile, int M>
inline void tail(const Panel& panel, const Rows& rows, const std::int32_t* index, int count, const float* bias,
                 float* out, std::int64_t out_stride) {
  if constexpr (M > 0) {
    if (count == M)
      Tile::template multiply<M>(panel, rows, index, bias, out, out_stride);
    else
      tail<Tile, M - 1>(panel, rows, index, count, bias, out, out_stride);
  }
}

// A Tile multiplies up to Tile::rows rows at once.
template <class Tile>
void gemm_rows(const Panel& panel, const Rows& rows, const std::int32_t* index, int count, const float* bias,
               float* out, std::int64_t out_stride) {
  int r = 0;
  for (; r + Tile::rows <= count; r += Tile::rows)
    Tile::template multiply<Tile::rows>(panel, rows, index + r, bias, out + r * out_stride, out_stride);
  tail<Tile, Tile::rows - 1>(panel, rows, index + r, count - r, bias, out + r * out_stride, out_stride);
}

template <class I, class Cell, class Scales>
void gemm(const Panel& panel, const Rows& rows, const std::int32_t* index, int count, const float* bias, float* out,
          std::int64_t out_stride) {
  if (panel.group == 32)
    return gemm_rows<CodeTile<I, Cell, Scales, 1>>(panel, rows, index, count, bias, out, out_stride);
  if (panel.group == 64)
    return gemm_rows<CodeTile<I, Cell, Scales, 2>>(panel, rows, index, count, bias, out, out_stride);
  return gemm_rows<CodeTile<I, Cell, Scales, 4>>(panel, rows, index, count, bias, out, out_stride);
}

template <class I>
std::int64_t int4_peak(std::int64_t rounds) {
  constexpr int M = I::tile_rows;
  std::uint8_t cells[256];
  std::int8_t codes[M][32];
  const std::int8_t* a[M];
  for (int i = 0; i < 256; ++i) cells[i] = static_cast<std::uint8_t>(37 * i);
  for (int r = 0; r < M; ++r) {
    a[r] = codes[r];
    for (int k = 0; k < 32; ++k) codes[r][k] = static_cast<std::int8_t>(31 * r + 7 * k);
  }
  typename I::Float total = I::broadcast(0.0f);
  for (std::int64_t round = 0; round < rounds; ++round) {
    asm volatile("" ::: "memory");  // the data may have changed: nothing is hoisted out of the loop
    typename I::Int sum[M];
    for (int i = 0; i < M; ++i) sum[i] = Int4Cell::start<I>(0);
    Int4Cell::block<I, M>(cells, a, sum);
    for (int i = 0; i < M; ++i) total = I::add(total, I::to_float(sum[i]));
  }
  float out[kLanes];
  I::store(out, total);
  asm volatile("" ::"r"(out) : "memory");
  return rounds * M * kLanes * 32;
}

}  // namespace moepack::gemm
