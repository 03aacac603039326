// Made blobs of the layout "torchao", byte by byte, and layers that hold the same codes and scales in both layouts.
#pragma once

#include <cstdint>
#include <vector>

#include "made.h"

namespace moepack::made {

using Bytes = std::vector<std::uint8_t>;

template <class T>
void append(Bytes& bytes, T value) {
  const auto* p = reinterpret_cast<const std::uint8_t*>(&value);
  bytes.insert(bytes.end(), p, p + sizeof value);
}

// The codes of 8 rows and 16 k, in two halves of k, row after row.
inline std::vector<int> chunk(const Matrix& m, std::int64_t row, std::int64_t k) {
  std::vector<int> values;
  for (int half = 0; half < 2; ++half)
    for (int r = 0; r < 8; ++r)
      for (int i = 0; i < 8; ++i) values.push_back(m.codes[(row + r) * m.cols + k + 8 * half + i]);
  return values;
}

// A scale of the matrix, without its exponent: fp32 if it has such.
inline float universal_scale(const Matrix& m, std::int64_t i) {
  return m.fp32.empty() ? float_from_half(m.scales[i]) : m.fp32[i];
}

inline Bytes universal(const Matrix& m) {
  Bytes blob;
  const bool int4 = m.scheme->cell == Cell::int4;
  for (const std::int32_t field : {6712, 1, int4 ? 4 : 8, 0, 0, 8, 16, 2, 0, 0, 0, 0, 0, 0, 0, 0}) append(blob, field);
  for (std::int64_t row = 0; row < m.rows; row += 8)
    for (std::int64_t g = 0; g < m.groups(); ++g) {
      for (std::int64_t k = g * m.scheme->group; k < (g + 1) * m.scheme->group; k += 16) {
        const std::vector<int> values = chunk(m, row, k);
        for (int run = 0; int4 && run < 128; run += 32)
          for (int i = run; i < run + 16; ++i)
            append(blob, static_cast<std::uint8_t>((values[i] + 8) | (values[i + 16] + 8) << 4));
        for (int i = 0; !int4 && i < 128; ++i) append(blob, static_cast<std::int8_t>(values[i]));
      }
      for (int r = 0; r < 8; ++r) append(blob, universal_scale(m, (row + r) * m.groups() + g));
      for (int r = 0; r < 8; ++r) append(blob, 0x7fffffff);  // sums of codes: not looked at
    }
  return blob;
}

struct Twins {
  Layer packed, universal;
};

inline Twins twins(const Scheme& scheme, std::int64_t D, std::int64_t F, std::int64_t E) {
  Layer packed{D, F, E, &scheme, 0, 0, {}, {}, {}, {}};
  Layer other = packed;
  other.layout = "torchao";
  for (std::int64_t e = 0; e < E; ++e) {
    Matrix w13 = matrix(scheme, 2 * F, D, static_cast<std::uint32_t>(3 + e));
    Matrix w2 = matrix(scheme, D, F, static_cast<std::uint32_t>(300 + e));
    w13.exponent = w2.exponent = 0;
    for (std::uint16_t& scale : w13.scales) scale = half_from_float(float_from_half(scale) * 0x1p-7f);
    const auto add = [](Bytes& to, const Bytes& blob) { to.insert(to.end(), blob.begin(), blob.end()); };
    add(packed.w13, w13.pack(RowOrder::gate_up));
    add(packed.w2, w2.pack(RowOrder::plain));
    add(other.w13, universal(w13));
    add(other.w2, universal(w2));
  }
  for (Layer* layer : {&packed, &other}) {
    layer->bytes13 = static_cast<std::int64_t>(layer->w13.size()) / E;
    layer->bytes2 = static_cast<std::int64_t>(layer->w2.size()) / E;
  }
  return {packed, other};
}

}  // namespace moepack::made
