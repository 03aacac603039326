// What surrounds the GEMMs: every instruction set against op.md in plain loops, bit by bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "gemm/kernel.h"
#include "made.h"
#include "plain.h"

namespace moepack {
namespace {

using Floats = std::vector<float>;

const Floats& special() {
  static const Floats values = {0.0f,    -0.0f,   1.0f,     -1.0f,   made::kNaN, -made::kNaN, made::kInf, -made::kInf,
                                1e-45f,  -1e-45f, 1e-38f,   -1e-38f, 3.4e38f,    -3.4e38f,    88.0f,      -88.0f,
                                88.001f, -87.0f,  -87.001f, 87.0f,   0.5f,       -0.5f,       1e-10f,     -1e-10f};
  return values;
}

// Bit patterns of all kinds: special values, any bits, and the range where exp is not at its limits.
Floats any_floats(std::int64_t n, std::uint32_t seed) {
  made::Random random(seed);
  Floats values = special();
  while (static_cast<std::int64_t>(values.size()) < n)
    values.push_back(random.below(2) ? float_from_bits(random.bits()) : random.uniform(-90.0f, 90.0f));
  values.resize(static_cast<std::size_t>(n));
  return values;
}

template <class F>
Floats mapped(const Floats& values, F f) {
  Floats result;
  for (const float value : values) result.push_back(f(value));
  return result;
}

TEST(Elementwise, ExpIsCloseToExp) {
  Floats x;
  for (int i = -8700000; i <= 8800000; i += 177) x.push_back(static_cast<float>(i) * 1e-5f);
  Floats y = x;
  made::kernel_of("scalar").exp_minus(y.data(), static_cast<int>(y.size()), 0.0f);
  // Two roundings at the end of Horner's scheme and r's own: 1.5 units of 2^-24 relative to [1, 2), and 3e-9.
  for (std::size_t i = 0; i < x.size(); ++i)
    ASSERT_NEAR(y[i] / std::exp(static_cast<double>(x[i])), 1.0, 3 * 0x1p-24 + 3e-9) << x[i];
}

TEST(Elementwise, ExpMinus) {
  for (const float shift : {0.0f, 3.25f, -80.0f, made::kNaN, made::kInf, -made::kInf}) {
    const Floats x = any_floats(40000, 41);
    const Floats expected = mapped(x, [&](float v) { return plain::exp(v - shift); });
    for (const std::string& isa : made::supported_isas()) {
      Floats y = x;
      made::kernel_of(isa).exp_minus(y.data(), static_cast<int>(y.size()), shift);
      EXPECT_TRUE(made::same(y, expected)) << isa << " " << shift;
    }
  }
}

TEST(Elementwise, Sigmoid) {
  const Floats x = any_floats(40000, 42), expected = mapped(x, plain::sigmoid);
  for (const std::string& isa : made::supported_isas()) {
    Floats y = x;
    made::kernel_of(isa).sigmoid(y.data(), static_cast<int>(y.size()));
    EXPECT_TRUE(made::same(y, expected)) << isa;
  }
}

TEST(Elementwise, EveryLengthAndNotOneMore) {
  for (const std::string& isa : made::supported_isas())
    for (int n = 0; n <= 40; ++n) {
      Floats y = any_floats(41, 43), z = y;
      Floats expected_y = y, expected_z = z;
      for (int i = 0; i < n; ++i) expected_y[i] = plain::exp(y[i] - 1.0f), expected_z[i] = plain::sigmoid(z[i]);
      made::kernel_of(isa).exp_minus(y.data(), n, 1.0f);
      made::kernel_of(isa).sigmoid(z.data(), n);
      ASSERT_TRUE(made::same(y, expected_y)) << isa << " " << n;
      ASSERT_TRUE(made::same(z, expected_z)) << isa << " " << n;
    }
}

TEST(Elementwise, Activate) {
  const Floats gate = any_floats(16 * 2000, 44);
  Floats up = any_floats(16 * 2000, 45), expected;
  std::reverse(up.begin(), up.end());
  for (std::size_t i = 0; i < gate.size(); ++i) expected.push_back(plain::silu_times(gate[i], up[i]));
  for (const std::string& isa : made::supported_isas()) {
    Floats in_place = gate, over_up = up;
    const std::int64_t n = static_cast<std::int64_t>(gate.size());
    made::kernel_of(isa).activate({}, in_place.data(), up.data(), in_place.data(), n);
    made::kernel_of(isa).activate({}, gate.data(), over_up.data(), over_up.data(), n);
    EXPECT_TRUE(made::same(in_place, expected)) << isa;
    EXPECT_TRUE(made::same(over_up, expected)) << isa;
  }
}

TEST(Elementwise, SiluOfSpecialValues) {
  EXPECT_EQ(bits_of(plain::silu_times(-0.0f, 1.0f)), bits_of(-0.0f));
  EXPECT_EQ(plain::silu_times(200.0f, 1.0f), 200.0f);
  EXPECT_TRUE(std::isnan(plain::silu_times(made::kNaN, 0.0f)));
}

using Kind = gemm::Activation::Kind;

std::vector<gemm::Activation> all_activations() {
  return {{Kind::silu, true, 1.0f, 7.0f, false, 0.0f, 0.0f},
          {Kind::silu, true, 1.0f, 7.0f, true, 0.0f, 0.0f},
          {Kind::silu, true, 1.0f, 0.0f, false, 4.0f, 25.0f},
          {Kind::gelu_tanh, true, 1.0f, 0.0f, false, 0.0f, 0.0f},
          {Kind::gelu_tanh, true, 1.0f, 2.0f, false, 0.0f, 0.0f},
          {Kind::swiglu_oai, true, 1.702f, 7.0f, false, 0.0f, 0.0f},
          {Kind::swiglu_oai, true, 0.5f, 0.0f, false, 0.0f, 0.0f},
          {Kind::relu, false, 1.0f, 0.0f, false, 0.0f, 0.0f},
          {Kind::relu2, false, 1.0f, 0.0f, false, 0.0f, 0.0f}};
}

TEST(Elementwise, EveryActivationIsTheSameOnEveryIsa) {
  const Floats gate = any_floats(16 * 3000, 71), up = any_floats(16 * 3000, 72);
  for (const gemm::Activation& activation : all_activations()) {
    Floats expected(gate.size());
    const std::int64_t n = static_cast<std::int64_t>(gate.size());
    made::kernel_of("scalar").activate(activation, gate.data(), up.data(), expected.data(), n);
    for (const std::string& isa : made::supported_isas()) {
      Floats out(gate.size());
      made::kernel_of(isa).activate(activation, gate.data(), activation.gated ? up.data() : nullptr, out.data(), n);
      EXPECT_TRUE(made::same(out, expected)) << isa << " " << static_cast<int>(activation.kind);
    }
  }
}

// In double, from the definitions (tanh and erf-free gelu as the papers have them), not from op.md's rearrangements.
double defined(const gemm::Activation& a, double g, double u) {
  const double limit = a.limit;
  if (a.kind == Kind::relu) return std::max(g, 0.0);
  if (a.kind == Kind::relu2) return std::max(g, 0.0) * std::max(g, 0.0);
  if (limit > 0) {
    if (!a.limit_after_act) g = std::min(g, limit);
    u = std::clamp(u, -limit, limit);
  }
  const auto cap = [](double v, double c) { return c > 0 ? c * std::tanh(v / c) : v; };
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  double act = cap(g, a.gate_softcap) * sigmoid(g);
  if (a.kind == Kind::gelu_tanh) act = 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
  if (a.kind == Kind::swiglu_oai) return g * sigmoid(a.alpha * g) * (u + 1);
  if (limit > 0 && a.limit_after_act) act = std::min(act, limit);
  return act * cap(u, a.up_softcap);
}

TEST(Elementwise, EveryActivationIsWhatItsNameSays) {
  Floats gate, up;
  for (int i = -480; i < 480; ++i)
    for (const float u : {-30.0f, -3.0f, -0.01f, 0.0f, 1e-4f, 0.3f, 2.0f, 40.0f}) {
      gate.push_back(static_cast<float>(i) / 40.0f);
      up.push_back(u);
    }
  for (const gemm::Activation& activation : all_activations()) {
    Floats out(gate.size());
    made::kernel_of("scalar").activate(activation, gate.data(), up.data(), out.data(),
                                       static_cast<std::int64_t>(gate.size()));
    for (std::size_t i = 0; i < gate.size(); ++i) {
      const double expected = defined(activation, gate[i], up[i]);
      // At most a dozen roundings follow each other; gelu's argument is exp's, rounded once where it is up to 87. The
      // definition itself cancels in 1 + tanh.
      const double cancelled = std::fabs(static_cast<double>(gate[i]) * up[i]) * 0x1p-53;
      ASSERT_NEAR(out[i], expected, (12 + 87) * 0x1p-24 * std::fabs(expected) + cancelled)
          << static_cast<int>(activation.kind) << " gate " << gate[i] << " up " << up[i];
    }
  }
}

TEST(Elementwise, Scale) {
  const Floats start = any_floats(16 * 500, 73);
  const Floats expected = mapped(start, [](float v) { return 0.37f * v; });
  for (const std::string& isa : made::supported_isas()) {
    Floats v = start;
    made::kernel_of(isa).scale(0.37f, v.data(), static_cast<std::int64_t>(v.size()));
    EXPECT_TRUE(made::same(v, expected)) << isa;
  }
}

TEST(Elementwise, Accumulate) {
  const Floats o = any_floats(16 * 500, 46), start = any_floats(16 * 500, 47);
  made::Random random(48);
  for (const std::string& isa : made::supported_isas())
    for (std::size_t i = 0; i < o.size(); i += 16) {
      const float weight = i % 5 ? random.uniform(-2.0f, 2.0f) : special()[i / 16 % special().size()];
      Floats y(start.begin() + static_cast<std::ptrdiff_t>(i), start.begin() + static_cast<std::ptrdiff_t>(i) + 16);
      Floats expected;
      for (int l = 0; l < 16; ++l) expected.push_back(std::fma(weight, o[i + l], y[l]));
      made::kernel_of(isa).accumulate(weight, o.data() + i, y.data());
      ASSERT_TRUE(made::same(y, expected)) << isa << " " << i;
    }
}

// codes, scales and offsets of one row, with guards behind each.
void expect_quantized(const std::string& isa, const Floats& v, int group) {
  const plain::Quantized expected = plain::quantize(v);
  const std::int64_t n = static_cast<std::int64_t>(v.size()), padded = round_up(n, group);
  std::vector<std::int8_t> codes(static_cast<std::size_t>(padded) + 1, 55);
  Floats scales(expected.scales.size() + 1, 55.0f);
  std::vector<std::int32_t> offsets(static_cast<std::size_t>(padded / group) + 1, 55);
  made::kernel_of(isa).quantize(v.data(), n, group, codes.data(), scales.data(), offsets.data());
  for (std::int64_t i = 0; i < padded; ++i)
    ASSERT_EQ(codes[i], i < n ? expected.codes[i] : 0) << isa << " n " << n << " group " << group << " at " << i;
  for (std::size_t i = 0; i < expected.scales.size(); ++i)
    ASSERT_TRUE(made::same(scales[i], expected.scales[i])) << isa;
  for (std::int64_t g = 0; g < padded / group; ++g)
    ASSERT_EQ(offsets[g], -8 * std::accumulate(codes.begin() + g * group, codes.begin() + (g + 1) * group, 0));
  ASSERT_EQ(codes.back(), 55);
  ASSERT_EQ(scales.back(), 55.0f);
  ASSERT_EQ(offsets.back(), 55);
}

void expect_quantized_everywhere(const Floats& v) {
  for (const std::string& isa : made::supported_isas())
    for (const int group : {32, 64, 128}) expect_quantized(isa, v, group);
}

TEST(Elementwise, QuantizeEveryLength) {
  for (std::int64_t n = 1; n <= 300; ++n) expect_quantized_everywhere(made::Random(49).floats(n));
}

TEST(Elementwise, QuantizeRoundsHalfToEven) {
  Floats v = {127.0f};
  for (int i = 0; i < 127; ++i) v.push_back((static_cast<float>(i) + 0.5f) * (i % 2 ? -1.0f : 1.0f));
  expect_quantized_everywhere(v);
  EXPECT_EQ(plain::quantize(v).codes[1], 0);
  EXPECT_EQ(plain::quantize(v).codes[2], -2);
}

TEST(Elementwise, QuantizeAnyBits) {
  made::Random random(50);
  for (int round = 0; round < 300; ++round) {
    Floats v;
    while (v.size() < 260) {
      const float any = float_from_bits(random.bits());
      if (std::isfinite(any) || round % 10 == 0)
        v.push_back(round % 2 ? any : std::ldexp(random.uniform(-1, 1), round - 150));
    }
    expect_quantized_everywhere(v);
  }
}

TEST(Elementwise, QuantizeSpecialGroups) {
  const float limits[] = {0x1p-119f,
                          std::nextafter(0x1p-119f, 0.0f),
                          std::nextafter(0x1p-119f, 1.0f),
                          1e-45f,
                          1e-38f,
                          3.4028235e38f,
                          -3.4028235e38f,
                          0.0f,
                          -0.0f,
                          made::kNaN,
                          -made::kNaN,
                          made::kInf,
                          -made::kInf};
  for (const float limit : limits)
    for (const std::size_t at : {0, 77, 127, 128, 199}) {
      Floats v(200, 0.0f);
      v[at] = limit;
      expect_quantized_everywhere(v);
      v = made::Random(51).floats(200);
      v[at] = limit;
      expect_quantized_everywhere(v);
    }
}

TEST(Elementwise, AGroupWithInfinityIsNaNAndLeavesTheOthersAlone) {
  Floats v(256, 1.0f);
  v[200] = -made::kInf;
  const plain::Quantized q = plain::quantize(v);
  EXPECT_EQ(q.scales[0], 1.0f / 127.0f);
  EXPECT_TRUE(std::isnan(q.scales[1]));
  EXPECT_EQ(q.codes[127], 127);
  EXPECT_EQ(q.codes[128], 0);
}

TEST(Elementwise, Router) {
  for (const std::int64_t d : {1, 2, 15, 16, 17, 31, 33, 64, 100, 257})
    for (int experts = 0; experts <= 9; ++experts) {
      made::Random random(52);
      const Floats x = random.floats(d), weights = random.floats(d * experts);
      Floats expected;
      for (int e = 0; e < experts; ++e) expected.push_back(plain::router_dot(x.data(), weights.data() + e * d, d));
      expected.push_back(55.0f);
      for (const std::string& isa : made::supported_isas()) {
        Floats logits(static_cast<std::size_t>(experts) + 1, 55.0f);
        made::kernel_of(isa).router(x.data(), weights.data(), d, experts, logits.data());
        ASSERT_TRUE(made::same(logits, expected)) << isa << " d " << d << " experts " << experts;
      }
    }
}

TEST(Elementwise, RouterOfMinusZeros) {
  for (const std::int64_t d : {1, 16, 19}) {
    const Floats x(static_cast<std::size_t>(d), -0.0f), weights(static_cast<std::size_t>(d), 1.0f);
    for (const std::string& isa : made::supported_isas()) {
      float logit = 5.0f;
      made::kernel_of(isa).router(x.data(), weights.data(), d, 1, &logit);
      EXPECT_EQ(bits_of(logit), bits_of(plain::router_dot(x.data(), weights.data(), d))) << isa;
    }
  }
}

TEST(Elementwise, RouterOfAnyBits) {
  const Floats x = any_floats(100, 53), weights = any_floats(100, 54);
  for (const std::string& isa : made::supported_isas()) {
    float logit = 5.0f;
    made::kernel_of(isa).router(x.data(), weights.data(), 100, 1, &logit);
    EXPECT_TRUE(made::same(logit, plain::router_dot(x.data(), weights.data(), 100))) << isa;
  }
}

}  // namespace
}  // namespace moepack
