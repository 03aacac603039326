// What is done to fp32 vectors around the GEMMs: exp, activation, quantizing, the router's dot products. One body for
// all instruction sets; docs/reference/op.md states every operation.
#pragma once

#include "gemm/kernel.h"

namespace moepack::gemm {

template <class I>
inline typename I::Float exp(typename I::Float x) {
  using Float = typename I::Float;
  const auto c = [](float value) { return I::broadcast(value); };
  x = I::max(c(-87.0f), I::min(c(88.0f), x));  // min and max return their second argument when one is NaN
  const Float n = I::rint(I::mul(x, c(0x1.715476p+0f)));
  Float r = I::fma(n, c(-0x1.63p-1f), x);
  r = I::fma(n, c(0x1.bd0106p-13f), r);
  constexpr float polynomial[] = {0x1.1239d4p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f, 0x1.fffffcp-2f, 1.0f, 1.0f};
  Float p = c(0x1.6a2444p-10f);
  for (const float next : polynomial) p = I::fma(p, r, c(next));
  return I::mul(p, I::pow2(n));
}

template <class I>
inline typename I::Float one_plus_exp_of_negative(typename I::Float x) {
  return I::add(I::broadcast(1.0f), exp<I>(I::negate(x)));
}

template <class I>
inline typename I::Float tanh(typename I::Float x) {
  using Float = typename I::Float;
  const auto c = [](float value) { return I::broadcast(value); };
  // Near zero 1 - 2 / (1 + exp(2x)) cancels; there an odd polynomial takes over.
  constexpr float polynomial[] = {0x1.522686p-6f, -0x1.b83c56p-5f, 0x1.110726p-3f, -0x1.555532p-2f};
  const Float square = I::mul(x, x);
  Float p = c(-0x1.75e17ap-8f);
  for (const float next : polynomial) p = I::fma(p, square, c(next));
  const Float near = I::fma(p, I::mul(square, x), x);
  const Float magnitude = I::max(x, I::negate(x));
  const Float far = I::sub(c(1.0f), I::div(c(2.0f), I::add(c(1.0f), exp<I>(I::add(magnitude, magnitude)))));
  const Float signed_far = I::select_less(x, c(0.0f), I::negate(far), far);
  return I::select_less(magnitude, c(0.625f), near, signed_far);
}

template <class I>
inline typename I::Float softcap(typename I::Float x, float cap) {
  return cap == 0.0f ? x : I::mul(I::broadcast(cap), tanh<I>(I::div(x, I::broadcast(cap))));
}

// The gate's side of a gated activation.
template <class I, Activation::Kind Kind>
inline typename I::Float activated(const Activation& a, typename I::Float g) {
  if constexpr (Kind == Activation::Kind::swiglu_oai)
    return I::div(g, one_plus_exp_of_negative<I>(I::mul(I::broadcast(a.alpha), g)));
  if constexpr (Kind == Activation::Kind::gelu_tanh) {
    const auto cube = I::mul(I::mul(I::broadcast(0x1.6e4e26p-5f), g), I::mul(g, g));
    return I::div(g, one_plus_exp_of_negative<I>(I::mul(I::broadcast(0x1.988454p+0f), I::add(g, cube))));
  }
  return I::div(softcap<I>(g, a.gate_softcap), one_plus_exp_of_negative<I>(g));
}

template <class I, Activation::Kind Kind>
inline void activate_gated(const Activation& a, const float* gate, const float* up, float* out, std::int64_t n) {
  const auto limit = I::broadcast(a.limit), minus_limit = I::broadcast(-a.limit);
  const bool before = a.limit != 0.0f && !a.limit_after_act, after = a.limit != 0.0f && a.limit_after_act;
  for (std::int64_t i = 0; i < n; i += kLanes) {
    auto g = I::load(gate + i), u = I::load(up + i);
    if (before) g = I::min(limit, g);
    if (before || after) u = I::max(minus_limit, I::min(limit, u));
    auto activated_gate = activated<I, Kind>(a, g);
    if (after) activated_gate = I::min(limit, activated_gate);
    if constexpr (Kind == Activation::Kind::swiglu_oai) u = I::add(u, I::broadcast(1.0f));
    I::store(out + i, I::mul(activated_gate, softcap<I>(u, a.up_softcap)));
  }
}

template <class I>
inline void activate_relu(bool squared, const float* v, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const auto positive = I::max(I::broadcast(0.0f), I::load(v + i));
    I::store(out + i, squared ? I::mul(positive, positive) : positive);
  }
}

template <class I>
void activate(const Activation& a, const float* gate, const float* up, float* out, std::int64_t n) {
  using Kind = Activation::Kind;
  switch (a.kind) {
    case Kind::silu:
      return activate_gated<I, Kind::silu>(a, gate, up, out, n);
    case Kind::gelu_tanh:
      return activate_gated<I, Kind::gelu_tanh>(a, gate, up, out, n);
    case Kind::swiglu_oai:
      return activate_gated<I, Kind::swiglu_oai>(a, gate, up, out, n);
    case Kind::relu:
      return activate_relu<I>(false, gate, out, n);
    case Kind::relu2:
      return activate_relu<I>(true, gate, out, n);
  }
}

template <class I>
void scale(float factor, float* v, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) I::store(v + i, I::mul(I::broadcast(factor), I::load(v + i)));
}

// Applies `f` to n values in place, the last vector through a padded copy.
template <class I, class F>
inline void for_each(float* v, int n, F f) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) I::store(v + i, f(I::load(v + i)));
  if (i == n) return;
  float last[kLanes] = {};
  for (int l = 0; l < n - i; ++l) last[l] = v[i + l];
  I::store(last, f(I::load(last)));
  for (int l = 0; l < n - i; ++l) v[i + l] = last[l];
}

template <class I>
void exp_minus(float* v, int n, float shift) {
  const auto m = I::broadcast(shift);
  for_each<I>(v, n, [m](typename I::Float x) { return exp<I>(I::sub(x, m)); });
}

template <class I>
void sigmoid(float* v, int n) {
  for_each<I>(v, n, [](typename I::Float x) { return I::div(I::broadcast(1.0f), one_plus_exp_of_negative<I>(x)); });
}

template <class I>
void accumulate(float weight, const float* o, float* y) {
  I::store(y, I::fma(I::broadcast(weight), I::load(o), I::load(y)));
}

inline constexpr std::uint32_t kInfinityBits = 0x7f800000;
inline constexpr std::uint32_t kTinyBits = (127 - 119) << 23;  // 2^-119

// One activation group of kActivationGroup values, already padded with zeros.
template <class I>
inline float quantize_group(const float* values, int n, std::int8_t* codes) {
  // The bits of |v| order like |v|, and NaN lies above infinity: one integer maximum finds amax and what is not finite.
  auto bits = I::absolute_bits(I::load(values));
  for (int i = kLanes; i < n; i += kLanes) bits = I::max_int(bits, I::absolute_bits(I::load(values + i)));
  const std::uint32_t amax_bits = static_cast<std::uint32_t>(I::reduce_max(bits));
  const bool finite = amax_bits < kInfinityBits;
  if (!finite || amax_bits < kTinyBits) {
    for (int i = 0; i < n; ++i) codes[i] = 0;
    return finite ? 0.0f : __builtin_nanf("");
  }
  float amax;
  __builtin_memcpy(&amax, &amax_bits, sizeof amax);
  const auto inverse = I::broadcast(127.0f / amax);
  for (int i = 0; i < n; i += kLanes) I::store_codes(codes + i, I::rint(I::mul(I::load(values + i), inverse)));
  return amax / 127.0f;
}

template <class I>
void quantize(const float* values, std::int64_t n, int group, std::int8_t* codes, float* scales,
              std::int32_t* offsets) {
  for (std::int64_t begin = 0; begin < n; begin += kActivationGroup) {
    const int length = static_cast<int>(n - begin < kActivationGroup ? n - begin : kActivationGroup);
    const int padded = (length + group - 1) / group * group;
    if (length == padded) {
      *scales++ = quantize_group<I>(values + begin, length, codes + begin);
    } else {
      float copy[kActivationGroup] = {};
      for (int i = 0; i < length; ++i) copy[i] = values[begin + i];
      *scales++ = quantize_group<I>(copy, padded, codes + begin);
    }
    for (int g = 0; g < padded; g += group) {
      std::int32_t sum = 0;
      for (int k = 0; k < group; ++k) sum += codes[begin + g + k];
      *offsets++ = -kZeroPoint * sum;
    }
  }
}

template <class I>
inline float pairwise_sum(typename I::Float v) {
  float p[kLanes];
  I::store(p, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) p[l] += p[l + half];
  return p[0];
}

template <class I, int N>
inline void router_rows(const float* x, const float* weights, std::int64_t d, float* logits) {
  typename I::Float sum[N];
  for (int e = 0; e < N; ++e) sum[e] = I::broadcast(0.0f);
  std::int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) {
    const auto v = I::load(x + i);
    for (int e = 0; e < N; ++e) sum[e] = I::fma(v, I::load(weights + e * d + i), sum[e]);
  }
  if (i < d) {
    float tail[1 + N][kLanes] = {};
    for (std::int64_t l = 0; l < d - i; ++l) {
      tail[0][l] = x[i + l];
      for (int e = 0; e < N; ++e) tail[1 + e][l] = weights[e * d + i + l];
    }
    for (int e = 0; e < N; ++e) sum[e] = I::fma(I::load(tail[0]), I::load(tail[1 + e]), sum[e]);
  }
  for (int e = 0; e < N; ++e) logits[e] = pairwise_sum<I>(sum[e]);
}

template <class I>
void router(const float* x, const float* weights, std::int64_t d, int experts, float* logits) {
  constexpr int at_once = 4;
  int e = 0;
  for (; e + at_once <= experts; e += at_once) router_rows<I, at_once>(x, weights + e * d, d, logits + e);
  for (; e < experts; ++e) router_rows<I, 1>(x, weights + e * d, d, logits + e);
}

}  // namespace moepack::gemm
