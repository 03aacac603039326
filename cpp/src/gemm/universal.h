// Cells of torchao's universal layout, multiplied where they lie: its panels of 8 rows are the halves of a panel here.
//
// A group of an 8-row panel is group / 8 pieces of 8 rows x 8 k, then 8 fp32 scales and 8 sums of codes, which are not
// needed where activations are symmetric. A 4-bit piece takes 32 bytes; its bytes 8i .. 8i+7, i = 0..3, hold 8 k of row
// {0, 1, 4, 5}[i] in their low and of the row two below it in their high nibbles. An 8-bit piece is 8 rows of 8 bytes.
//
// Every instruction set multiplies one half after the other, which reads memory in order, in vectors of 8 lanes
// (I::Half). One whose registers hold both halves takes them together where there are many rows: fewer instructions.
// Such a vector V has V::NibblePieces and V::BytePieces: how many k a step takes, the weights of a step, and the Sums
// of a row.
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

// Found by the tile through its argument.
template <class I, int Lines>
inline void prefetch(const BothHalves& w) {
  prefetch<I, Lines>(w.first);
  prefetch<I, Lines>(w.second);
}

template <class I>
concept TakesBothHalves = requires { typename I::NibblePieces; };

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

struct UniversalScales : SingleScales {
  static constexpr int bytes = (4 + 4) * kHalfLanes;  // the sums behind them are passed over
};

template <class Halves, int Bits>
struct UniversalCell {
  static constexpr int block_bytes = 32 * Bits;
  template <class I>
  using Vector = typename Halves::template Vector<I>;
  static auto begin(const Panel& panel) { return Halves::begin(panel, half_bytes(panel)); }

  static std::int64_t half_bytes(const Panel& panel) {
    return std::int64_t{panel.groups} * (panel.group / 32 * block_bytes + UniversalScales::bytes);
  }

 protected:
  // Dot products of four bytes leave two sums a row side by side, of k = 0..3 and of k = 4..7; fold adds them.
  template <class Pieces, int M, class Place, class Int>
  static inline void add(Place place, const std::int8_t* const* a, Int* sum) {
    typename Pieces::Sums sums[M] = {};
#pragma GCC unroll 4
    for (int k = 0; k < 32; k += Pieces::k, place += Pieces::k * Bits) {
      const auto weights = Pieces::load(place);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) sums[i].mac(weights, a[i] + k);
    }
    for (int i = 0; i < M; ++i) sum[i] = sums[i].fold(sum[i]);
  }
};

template <class Halves>
struct UniversalInt4Cell : UniversalCell<Halves, 4> {
  template <class V, int M, class Place>
  static inline void block(const Place& place, const std::int8_t* const* a, typename V::Int* sum) {
    UniversalInt4Cell::template add<typename V::NibblePieces, M>(place, a, sum);
  }
  template <class V>
  static inline typename V::Int start(std::int32_t offset) {
    return V::broadcast_int(offset);
  }
};

template <class Halves>
struct UniversalInt8Cell : UniversalCell<Halves, 8> {
  template <class V, int M, class Place>
  static inline void block(const Place& place, const std::int8_t* const* a, typename V::Int* sum) {
    UniversalInt8Cell::template add<typename V::BytePieces, M>(place, a, sum);
  }
  template <class V>
  static inline typename V::Int start(std::int32_t offset) {
    return V::start_int8(offset);
  }
};

template <class I, template <class Halves> class Cell>
void universal_gemm(const Panel& panel, const Rows& rows, const std::int32_t* index, int count, const float* bias,
                    float* out, std::int64_t out_stride) {
  if constexpr (TakesBothHalves<I>)
    if (count >= I::tile_rows)
      return gemm<I, Cell<Together>, UniversalScales>(panel, rows, index, count, bias, out, out_stride);
  for (int half = 0; half < 2; ++half) {
    const Panel half_panel = {panel.bytes + half * Cell<OneByOne>::half_bytes(panel), panel.groups, panel.group,
                              panel.scale};
    const int column = half * kHalfLanes;
    gemm<I, Cell<OneByOne>, UniversalScales>(half_panel, rows, index, count, bias ? bias + column : nullptr,
                                             out + column, out_stride);
  }
}

}  // namespace moepack::gemm
