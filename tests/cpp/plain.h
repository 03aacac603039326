// op.md and packed-format.md once more, in the plainest loops and from the pages alone: what the core is compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string_view>
#include <vector>

#include "half.h"
#include "moepack/ffn.h"

namespace moepack::plain {

inline std::uint32_t little_endian(const std::uint8_t* p, int bytes) {
  std::uint32_t value = 0;
  for (int i = bytes - 1; i >= 0; --i) value = value << 8 | p[i];
  return value;
}

// Sign, exponent, mantissa.
inline float e2m1(std::int8_t code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const float value = exponent == 0 ? 0.5f * static_cast<float>(mantissa)
                                    : std::ldexp(1.0f + 0.5f * static_cast<float>(mantissa), exponent - 1);
  return code & 8 ? -value : value;
}

inline float e4m3(std::int8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(8.0f + static_cast<float>(mantissa), exponent - 10);
  return code & 0x80 ? -value : value;
}

// A matrix read from its blob, one element after the other.
struct Decoded {
  Cell cell;
  std::int64_t rows, cols, group;
  std::int32_t exponent;
  std::vector<std::int8_t> codes;         // [rows, cols]
  std::vector<std::uint8_t> scale_bytes;  // [rows, groups] as stored: e8m0, fp16 or fp32

  std::int64_t groups() const { return (cols + group - 1) / group; }
  float scale(std::int64_t n, std::int64_t g) const {
    const std::int64_t i = n * groups() + g, size = static_cast<std::int64_t>(scale_bytes.size()) / (rows * groups());
    if (size == 1) return float_from_bits(std::uint32_t{scale_bytes[i]} << 23);
    if (size == 4) return float_from_bits(little_endian(&scale_bytes[4 * i], 4));
    return float_from_half(static_cast<std::uint16_t>(little_endian(&scale_bytes[2 * i], 2)));
  }
  float value(std::int64_t n, std::int64_t k) const {
    const std::int8_t code = codes[n * cols + k];
    return cell == Cell::mxfp4 ? e2m1(code) : cell == Cell::fp8 ? e4m3(code) : static_cast<float>(code);
  }
  double weight(std::int64_t n, std::int64_t k) const {
    return std::ldexp(value(n, k) * static_cast<double>(scale(n, k / group)), exponent);
  }
};

// The format's addresses, for any row and k of the padded matrix.
struct Addresses {
  explicit Addresses(const std::uint8_t* blob)
      : cell(static_cast<Cell>(little_endian(blob + 6, 2))),
        rows(little_endian(blob + 8, 4)),
        cols(little_endian(blob + 12, 4)),
        group(little_endian(blob + 16, 4)),
        gate_up(little_endian(blob + 28, 2) == 1),
        nibbles(cell == Cell::int4 || cell == Cell::mxfp4),
        scale_size(cell == Cell::mxfp4 ? 1
                   : cell == Cell::fp8 ? 4
                                       : 2),
        groups((cols + group - 1) / group),
        group_bytes(group * (nibbles ? 8 : 16) + 16 * scale_size) {}

  std::int64_t panel(std::int64_t row) const {
    if (!gate_up) return row / 16;
    const std::int64_t half = rows / 2;
    return row < half ? row / 16 * 2 : (row - half) / 16 * 2 + 1;
  }
  std::int64_t column(std::int64_t row) const { return (gate_up && row >= rows / 2 ? row - rows / 2 : row) % 16; }
  std::int64_t group_at(std::int64_t panel, std::int64_t g) const { return 64 + (panel * groups + g) * group_bytes; }

  std::int8_t code(const std::uint8_t* blob, std::int64_t panel, std::int64_t column, std::int64_t k) const {
    const std::uint8_t* cells = blob + group_at(panel, k / group);
    const std::int64_t within = k % group;
    if (cell == Cell::fp8) return static_cast<std::int8_t>(cells[within * 16 + column]);
    if (cell == Cell::int8) return static_cast<std::int8_t>(cells[within / 4 * 64 + column * 4 + within % 4]);
    const std::uint8_t byte = cells[within / 8 * 64 + column * 4 + within % 4];
    return static_cast<std::int8_t>((within % 8 < 4 ? byte & 15 : byte >> 4) - (cell == Cell::int4 ? 8 : 0));
  }
  // The bytes of a scale.
  const std::uint8_t* scale(const std::uint8_t* blob, std::int64_t panel, std::int64_t column, std::int64_t g) const {
    return blob + group_at(panel, g) + group_bytes - scale_size * (16 - column);
  }

  Cell cell;
  std::int64_t rows, cols, group;
  bool gate_up, nibbles;
  std::int64_t scale_size, groups, group_bytes;
};

inline Decoded decode(const std::uint8_t* blob) {
  const Addresses at(blob);
  Decoded m{at.cell, at.rows, at.cols, at.group, static_cast<std::int32_t>(little_endian(blob + 20, 4)), {}, {}};
  for (std::int64_t n = 0; n < m.rows; ++n) {
    for (std::int64_t k = 0; k < m.cols; ++k) m.codes.push_back(at.code(blob, at.panel(n), at.column(n), k));
    for (std::int64_t g = 0; g < at.groups; ++g) {
      const std::uint8_t* scale = at.scale(blob, at.panel(n), at.column(n), g);
      m.scale_bytes.insert(m.scale_bytes.end(), scale, scale + at.scale_size);
    }
  }
  return m;
}

inline float exp(float x) {
  if (x != x) return x;
  x = std::max(-87.0f, std::min(88.0f, x));
  const float n = std::rint(x * 0x1.715476p+0f);
  float r = std::fma(n, -0x1.63p-1f, x);
  r = std::fma(n, 0x1.bd0106p-13f, r);
  float p = 0x1.6a2444p-10f;
  for (const float c : {0x1.1239d4p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f, 0x1.fffffcp-2f, 1.0f, 1.0f})
    p = std::fma(p, r, c);
  return std::ldexp(p, static_cast<int>(n));
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
inline float silu_times(float g, float u) { return g / (1.0f + exp(-g)) * u; }

struct Quantized {
  std::vector<std::int8_t> codes;
  std::vector<float> scales;  // per 128 values
};

inline Quantized quantize(const std::vector<float>& v) {
  Quantized q;
  for (std::size_t begin = 0; begin < v.size(); begin += 128) {
    const std::size_t end = std::min(v.size(), begin + 128);
    float amax = 0.0f;
    bool finite = true;
    for (std::size_t i = begin; i < end; ++i) {
      finite = finite && std::isfinite(v[i]);
      amax = std::max(amax, std::fabs(v[i]));
    }
    const bool live = finite && amax >= 0x1p-119f;
    q.scales.push_back(live ? amax / 127.0f : finite ? 0.0f : NAN);
    for (std::size_t i = begin; i < end; ++i)
      q.codes.push_back(live ? static_cast<std::int8_t>(std::rint(v[i] * (127.0f / amax))) : 0);
  }
  return q;
}

// Row n of the weights against a quantized row, without bias. mxfp4's values are taken twice.
inline float dot(const Decoded& w, std::int64_t n, const Quantized& a) {
  const bool halves = w.cell == Cell::mxfp4;
  float acc = 0.0f;
  for (std::int64_t begin = 0; begin < w.cols; begin += 128) {
    const std::int64_t end = std::min<std::int64_t>(w.cols, begin + 128);
    float inner = 0.0f;
    for (std::int64_t k = begin; k < end; k += w.group) {
      std::int32_t idot = 0;
      for (std::int64_t i = k; i < std::min(end, k + w.group); ++i)
        idot += static_cast<std::int32_t>(w.value(n, i) * (halves ? 2.0f : 1.0f)) * a.codes[i];
      inner = std::fma(static_cast<float>(idot), w.scale(n, k / w.group), inner);
    }
    acc = std::fma(inner, a.scales[begin / 128], acc);
  }
  return acc * std::ldexp(1.0f, w.exponent - (halves ? 1 : 0));
}

// The same against a row of values, for fp8.
inline float dot(const Decoded& w, std::int64_t n, const std::vector<float>& a) {
  float acc = 0.0f;
  for (std::int64_t begin = 0; begin < w.cols; begin += 128) {
    float part[4] = {};
    for (std::int64_t k = begin; k < begin + 128; ++k) {
      const bool inside = k < w.cols;
      float& p = part[(k - begin) / 32];
      p = std::fma(inside ? a[k] : 0.0f, inside ? w.value(n, k) * 0x1p-8f : 0.0f, p);
    }
    acc = std::fma(((part[0] + part[1]) + part[2]) + part[3], w.scale(n, begin / 128), acc);
  }
  return acc * std::ldexp(1.0f, w.exponent + 8);
}

template <class Row>
std::vector<float> gemm(const Decoded& w, const Row& a, const float* bias) {
  std::vector<float> out;
  for (std::int64_t n = 0; n < w.rows; ++n) out.push_back(bias ? dot(w, n, a) + bias[n] : dot(w, n, a));
  return out;
}

// Quantizes the values first, unless the weights are fp8.
inline std::vector<float> project(const Decoded& w, const std::vector<float>& values, const float* bias) {
  return w.cell == Cell::fp8 ? gemm(w, values, bias) : gemm(w, quantize(values), bias);
}

// One expert on one row: the output of w2.
inline std::vector<float> expert(const ExpertTensors& t, const Shape& s, std::int64_t e, const std::vector<float>& x) {
  const Decoded w13 = decode(t.packed_w13 + e * t.bytes13), w2 = decode(t.packed_w2 + e * t.bytes2);
  const std::vector<float> gate_up = project(w13, x, t.bias13 ? t.bias13 + e * 2 * s.F : nullptr);
  std::vector<float> h;
  for (std::int64_t f = 0; f < s.F; ++f) h.push_back(silu_times(gate_up[f], gate_up[s.F + f]));
  return project(w2, h, t.bias2 ? t.bias2 + e * s.D : nullptr);
}

// x [T, D] -> [T, D], before the result is rounded to the dtype of x.
inline std::vector<float> experts(const ExpertTensors& t, const Shape& s, const std::vector<float>& x,
                                  const std::vector<std::int64_t>& ids, const std::vector<float>& weights) {
  std::vector<float> y(static_cast<std::size_t>(s.T * s.D), 0.0f);
  for (std::int64_t token = 0; token < s.T; ++token) {
    const std::vector<float> row(x.begin() + token * s.D, x.begin() + (token + 1) * s.D);
    for (std::int64_t pair = token * s.K; pair < (token + 1) * s.K; ++pair) {
      const std::vector<float> o = expert(t, s, ids[pair], row);
      for (std::int64_t d = 0; d < s.D; ++d) y[token * s.D + d] = std::fma(weights[pair], o[d], y[token * s.D + d]);
    }
  }
  return y;
}

inline float router_dot(const float* x, const float* w, std::int64_t d) {
  float p[16] = {};
  for (std::int64_t i = 0; i < (d + 15) / 16 * 16; ++i)
    p[i % 16] = i < d ? std::fma(x[i], w[i], p[i % 16]) : std::fma(0.0f, 0.0f, p[i % 16]);
  for (int half : {8, 4, 2, 1})
    for (int l = 0; l < half; ++l) p[l] += p[l + half];
  return p[0];
}

struct Selected {
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
};

// NaN below -inf, ties to the lowest id: the indices of `values`, best first.
inline std::vector<std::int64_t> ranking(const std::vector<float>& values) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    if (values[a] != values[a]) return false;
    return values[b] != values[b] || values[a] > values[b];
  });
  return order;
}

inline float largest(const std::vector<float>& values) {
  const float best = values[ranking(values)[0]];
  return best == best ? best : 0.0f;
}

inline float sum_of(const std::vector<float>& values) {
  float sum = 0.0f;
  for (const float value : values) sum += value;
  return sum;
}

inline std::vector<float> softmax(std::vector<float> values) {
  const float m = largest(values);
  for (float& value : values) value = exp(value - m);
  const float sum = sum_of(values);
  for (float& value : values) value = value / sum;
  return values;
}

// Which groups of experts stay.
inline std::vector<bool> kept_groups(const std::vector<float>& choice, const RoutingAttributes& r) {
  const std::int64_t size = static_cast<std::int64_t>(choice.size()) / r.n_group;
  std::vector<float> scores;
  for (std::int64_t g = 0; g < r.n_group; ++g) {
    const std::vector<float> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    const std::vector<std::int64_t> order = ranking(members);
    scores.push_back(r.group_score == "max" ? members[order[0]] : members[order[0]] + members[order[1]]);
  }
  std::vector<bool> kept(static_cast<std::size_t>(r.n_group), false);
  const std::vector<std::int64_t> order = ranking(scores);
  for (std::int64_t i = 0; i < r.topk_group; ++i) kept[order[i]] = true;
  return kept;
}

inline Selected select(const std::vector<float>& logits, std::int64_t K, const RoutingAttributes& r,
                       const float* expert_bias) {
  std::vector<float> score = r.score_func == "softmax_all" ? softmax(logits) : logits;
  if (r.score_func == "sigmoid") std::transform(score.begin(), score.end(), score.begin(), sigmoid);
  std::vector<float> choice = score;
  if (expert_bias)
    for (std::size_t e = 0; e < choice.size(); ++e) choice[e] += expert_bias[e];

  Selected s;
  const std::vector<bool> kept = r.n_group > 1 ? kept_groups(choice, r) : std::vector<bool>{true};
  const std::int64_t size = static_cast<std::int64_t>(choice.size()) / r.n_group;
  for (const std::int64_t e : ranking(choice))
    if (kept[e / size] && static_cast<std::int64_t>(s.ids.size()) < K) s.ids.push_back(e);

  for (const std::int64_t e : s.ids) s.weights.push_back(score[e]);
  if (r.score_func == "softmax") s.weights = softmax(s.weights);
  if (r.norm_topk) {
    const float sum = sum_of(s.weights), eps = static_cast<float>(r.norm_eps);
    const float divisor = !r.norm_clamp ? sum + eps : sum < eps ? eps : sum;
    for (float& w : s.weights) w = w / divisor;
  }
  for (float& w : s.weights) w = w * static_cast<float>(r.route_scale);
  return s;
}

}  // namespace moepack::plain
