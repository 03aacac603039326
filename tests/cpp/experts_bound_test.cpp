// The op against the float block: double precision, dequantized weights, and a derived bound of what int8 activations
// and fp32 arithmetic may change.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "made.h"
#include "plain.h"

namespace moepack {
namespace {

using made::Layer;

// A value and how far the op may be from it.
struct Bounded {
  double value, error;
};

// Largest rounding of sums of n products in fp32: each term passes at most n + 3 roundings.
double rounding(std::int64_t n, double magnitude) { return static_cast<double>(n + 3) * 0x1p-24 * magnitude; }

// Half a step of each value's activation group: amax / 127 / 2, and the roundings of scale and product.
std::vector<Bounded> after_quantizing(const std::vector<Bounded>& v) {
  std::vector<Bounded> result = v;
  for (std::size_t begin = 0; begin < v.size(); begin += 128) {
    const std::size_t end = std::min(v.size(), begin + 128);
    double amax = 0.0;
    for (std::size_t i = begin; i < end; ++i) amax = std::max(amax, std::fabs(v[i].value) + v[i].error);
    for (std::size_t i = begin; i < end; ++i) result[i].error += amax / 254 * (1 + 0x1p-14);
  }
  return result;
}

std::vector<Bounded> bounded_gemm(const plain::Decoded& w, const std::vector<Bounded>& a, const float* bias) {
  const bool quantizes = w.cell != Cell::fp8;  // otherwise every product is a term of its own
  const std::vector<Bounded> q = quantizes ? after_quantizing(a) : a;
  std::vector<Bounded> out;
  for (std::int64_t n = 0; n < w.rows; ++n) {
    double value = bias ? bias[n] : 0.0, error = 0.0, magnitude = std::fabs(value);
    for (std::int64_t k = 0; k < w.cols; ++k) {
      value += w.weight(n, k) * q[k].value;
      error += std::fabs(w.weight(n, k)) * q[k].error;
      magnitude += std::fabs(w.weight(n, k)) * (std::fabs(q[k].value) + q[k].error);
    }
    out.push_back({value, error + rounding(quantizes ? w.groups() : w.cols, magnitude)});
  }
  return out;
}

// |silu'| <= 1.1; exp is within 4 * 2^-24, and four more operations follow.
Bounded bounded_silu_times(Bounded g, Bounded u) {
  const double silu = g.value / (1 + std::exp(-g.value)), error = 1.1 * g.error;
  const double value = silu * u.value, largest = (std::fabs(silu) + error) * (std::fabs(u.value) + u.error);
  return {value, error * (std::fabs(u.value) + u.error) + std::fabs(silu) * u.error + 8 * 0x1p-24 * largest};
}

std::vector<Bounded> bounded_expert(const Layer& l, std::int64_t e, const std::vector<Bounded>& x) {
  const plain::Decoded w13 = plain::decode(l.w13.data() + e * l.bytes13),
                       w2 = plain::decode(l.w2.data() + e * l.bytes2);
  const auto gate_up = bounded_gemm(w13, x, l.bias13.empty() ? nullptr : l.bias13.data() + e * 2 * l.F);
  std::vector<Bounded> h;
  for (std::int64_t f = 0; f < l.F; ++f) h.push_back(bounded_silu_times(gate_up[f], gate_up[l.F + f]));
  return bounded_gemm(w2, h, l.bias2.empty() ? nullptr : l.bias2.data() + e * l.D);
}

TEST(ExpertsBound, HoldsForEveryScheme) {
  for (const Scheme* scheme : made::all_schemes()) {
    const Layer l = made::layer(*scheme, 200, 150, 3, true);
    const std::vector<float> x = made::Random(61).floats(2 * 200);
    const made::Routing r = made::routing(2, 2, 3);
    const std::vector<float> out = made::experts(l, x, r);
    double signal = 0.0, noise = 0.0;
    for (std::int64_t t = 0; t < 2; ++t) {
      std::vector<Bounded> row, y(200, {0.0, 0.0});
      for (std::int64_t d = 0; d < 200; ++d) row.push_back({x[t * 200 + d], 0.0});
      for (std::int64_t pair = 2 * t; pair < 2 * t + 2; ++pair) {
        const std::vector<Bounded> o = bounded_expert(l, r.ids[pair], row);
        for (std::int64_t d = 0; d < 200; ++d) {
          y[d].value += r.weights[pair] * o[d].value;
          y[d].error += std::fabs(r.weights[pair]) * (o[d].error + rounding(2, std::fabs(o[d].value) + o[d].error));
        }
      }
      for (std::int64_t d = 0; d < 200; ++d) {
        ASSERT_NEAR(out[t * 200 + d], y[d].value, y[d].error) << scheme->name << " " << t << " " << d;
        signal += y[d].value * y[d].value;
        noise += std::pow(out[t * 200 + d] - y[d].value, 2);
      }
    }
    // The bound is for the worst case; int8 activations are far better than it: two roundings to 1/127 of the largest.
    EXPECT_GT(10 * std::log10(signal / noise), 30.0) << scheme->name;
  }
}

}  // namespace
}  // namespace moepack
