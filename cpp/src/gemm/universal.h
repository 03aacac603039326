// Cells of torchao's universal layout, multiplied where they lie: its panels of 8 rows are the halves of a panel here.
//
// A group of an 8-row panel is group / 8 pieces of 8 rows x 8 k, then 8 fp32 scales and 8 sums of codes, which are not
// needed where activations are symmetric. A 4-bit piece takes 32 bytes; its bytes 8i .. 8i+7, i = 0..3, hold 8 k of row
// {0, 1, 4, 5}[i] in their low and of the row two below it in their high nibbles. An 8-bit piece is 8 rows of 8 bytes.
//
// Every instruction set multiplies one half after the other, which reads memory in order, in vectors of 8 lanes
// (I::Half). One whose registers hold both halves takes them together where there are many rows: fewer instructions.
#pragma once

#include "gemm/tile.h"

namespace moepack::gemm {

constexpr int kHalfLanes = kLanes / 2;

// The same place in both halves of a panel.
struct BothHalves {
  const std::uint8_t *first, *second;

  void operator+=(std::int64_t bytes) {
    first += bytes;
    second += bytes;
  }
};

template <class I, int Lines>
inline void prefetch(const BothHalves& w) {
  prefetch<I, Lines>(w.first);
  prefetch<I, Lines>(w.second);
}

struct OneByOne {
  template <class I>
  using Vector = typename I::Half;
  static const std::uint8_t* begin(const Panel& panel, std::int64_t) { return panel.bytes; }
};

struct Together {
  template <class I>
  using Vector = I;
  static BothHalves begin(const Panel& panel, std::int64_t half_bytes) {
    return {panel.bytes, panel.bytes + half_bytes};
  }
};

struct UniversalScales {
  static constexpr int bytes = 8 * kHalfLanes;
  template <class V, class Place>
  static inline typename V::Float load(const Place& p) {
    return V::load_single(p);
  }
};

template <class Halves, int BlockBytes>
struct UniversalCell {
  static constexpr int block_bytes = BlockBytes;
  template <class I>
  using Vector = typename Halves::template Vector<I>;
  static auto begin(const Panel& panel) { return Halves::begin(panel, half_bytes(panel)); }

  static std::int64_t half_bytes(const Panel& panel) {
    return panel.groups * (panel.group / 32 * BlockBytes + UniversalScales::bytes);
  }
};

template <class Halves>
struct UniversalInt4Cell : UniversalCell<Halves, 128> {
  template <class V, int M, class Place>
  static inline void block(const Place& pieces, const std::int8_t* const* a, typename V::Int* sum) {
    V::template nibble_block<M>(pieces, a, sum);
  }
  template <class V>
  static inline typename V::Int start(std::int32_t offset) {
    return V::broadcast_int(offset);
  }
};

template <class Halves>
struct UniversalInt8Cell : UniversalCell<Halves, 256> {
  template <class V, int M, class Place>
  static inline void block(const Place& pieces, const std::int8_t* const* a, typename V::Int* sum) {
    V::template byte_block<M>(pieces, a, sum);
  }
  template <class V>
  static inline typename V::Int start(std::int32_t offset) {
    return V::start_int8(offset);
  }
};

template <class I, template <class Halves> class Cell>
void universal_gemm(const Panel& panel, const Rows& rows, const std::int32_t* index, int count, const float* bias,
                    float* out, std::int64_t out_stride) {
  if constexpr (requires { I::load_single(BothHalves{}); })
    if (count >= I::tile_rows)
      return gemm<I, Cell<Together>, UniversalScales>(panel, rows, index, count, bias, out, out_stride);
  for (int half = 0; half < 2; ++half) {
    const Panel own = {panel.bytes + half * Cell<OneByOne>::half_bytes(panel), panel.groups, panel.group, panel.scale};
    const int column = half * kHalfLanes;
    gemm<I, Cell<OneByOne>, UniversalScales>(own, rows, index, count, bias ? bias + column : nullptr, out + column,
                                             out_stride);
  }
}

}  // namespace moepack::gemm
