// Made inputs for the tests: matrices, blobs, layers of experts, routings. All from fixed seeds.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gemm/registry.h"
#include "half.h"
#include "moepack/ffn.h"
#include "moepack/isa.h"
#include "moepack/packed.h"
#include "started_threads.h"

namespace moepack::made {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline const std::vector<int> kThreads = {1, 2, 3, 5};

// The standard's distributions differ between libraries; this one does not.
class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  std::uint32_t bits() { return static_cast<std::uint32_t>(engine_()); }
  std::int64_t below(std::int64_t n) { return bits() % n; }
  float uniform(float low, float high) { return low + (high - low) * (static_cast<float>(bits() >> 8) * 0x1p-24f); }
  std::vector<float> floats(std::int64_t n, float low = -1.0f, float high = 1.0f) {
    std::vector<float> values(static_cast<std::size_t>(n));
    for (float& value : values) value = uniform(low, high);
    return values;
  }

 private:
  std::mt19937 engine_;
};

// Bell-shaped like trained weights.
inline std::vector<float> trained(std::int64_t n, float factor, std::uint32_t seed = 1) {
  Random random(seed);
  std::vector<float> w;
  for (std::int64_t i = 0; i < n; ++i) {
    float sum = 0.0f;
    for (int j = 0; j < 8; ++j) sum += random.uniform(-1.0f, 1.0f);
    w.push_back(sum * 0.02f * factor);
  }
  return w;
}

// The contract of op.md: equal bits, where NaN equals NaN.
inline bool same(float a, float b) { return (a != a && b != b) || bits_of(a) == bits_of(b); }

inline testing::AssertionResult same(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " values against " << b.size();
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!same(a[i], b[i]))
      return testing::AssertionFailure() << "value " << i << " of " << a.size() << ": " << a[i] << " against " << b[i];
  return testing::AssertionSuccess();
}

inline testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' does not say '" << part << "'";
}

// Rows [begin, end) of a matrix of `cols` columns.
inline std::vector<float> rows_of(const std::vector<float>& values, std::int64_t begin, std::int64_t end,
                                  std::int64_t cols) {
  return {values.begin() + begin * cols, values.begin() + end * cols};
}

inline std::vector<const Scheme*> all_schemes() {
  std::vector<const Scheme*> result;
  for (const Scheme* scheme = schemes_begin(); scheme != schemes_end(); ++scheme) result.push_back(scheme);
  return result;
}

// Those with integer codes and fp16 scales.
inline std::vector<const Scheme*> integer_schemes() {
  std::vector<const Scheme*> result;
  for (const Scheme* scheme : all_schemes())
    if (cell_info(scheme->cell).scale == ScaleType::fp16) result.push_back(scheme);
  return result;
}

// Those whose weights are multiplied with quantized activations.
inline std::vector<const Scheme*> quantizing_schemes() {
  std::vector<const Scheme*> result;
  for (const Scheme* scheme : all_schemes())
    if (scheme->cell != Cell::fp8) result.push_back(scheme);
  return result;
}

inline std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (int i = 0; i < isa_count(); ++i)
    if (isa_info(i).supported) names.push_back(isa_info(i).name);
  return names;
}

// Forces an instruction set while it lives.
class ForcedIsa {
 public:
  explicit ForcedIsa(const std::string& name) {
    const Status status = force_isa(name.c_str());
    EXPECT_TRUE(status.ok()) << status.message();
  }
  ~ForcedIsa() { EXPECT_TRUE(force_isa(nullptr).ok()); }
};

inline const gemm::Kernel& kernel_of(const std::string& isa) {
  const ForcedIsa forced(isa);
  const gemm::Kernel* kernel = nullptr;
  EXPECT_TRUE(gemm::active_kernel(kernel).ok());
  return *kernel;
}

// `bytes` of scratch at an address that is 64-byte aligned and no more, full of NaNs, between guards.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + 3 * kGuard, kFill) {
    const std::size_t at = reinterpret_cast<std::uintptr_t>(memory_.data() + kGuard) % 128;
    begin_ = memory_.data() + kGuard + (192 - at) % 128;
    std::memset(begin_, 0xff, bytes);
  }
  ~Workspace() {
    std::size_t damaged = 0;
    for (std::uint8_t* p = memory_.data(); p != memory_.data() + memory_.size(); ++p)
      if (p < begin_ || p >= begin_ + bytes_) damaged += *p != kFill;
    EXPECT_EQ(damaged, 0u) << "bytes written outside of the workspace";
  }
  Workspace(const Workspace&) = delete;

  void* base() { return begin_; }

 private:
  static constexpr std::size_t kGuard = 4096;
  static constexpr std::uint8_t kFill = 0x5a;
  std::size_t bytes_;
  std::vector<std::uint8_t> memory_;
  std::uint8_t* begin_;
};

template <class T>
std::vector<std::uint8_t> bytes_of(const std::vector<T>& values) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

// Codes and scales as pack() takes them; of the scales, those of the cell's type.
struct Matrix {
  const Scheme* scheme;
  std::int64_t rows, cols;
  std::int32_t exponent;
  std::vector<std::int8_t> codes;
  std::vector<std::uint16_t> scales;
  std::vector<std::uint8_t> e8m0 = {};
  std::vector<float> fp32 = {};

  std::vector<std::uint8_t> scale_bytes() const {
    return scheme->cell == Cell::mxfp4 ? e8m0 : scheme->cell == Cell::fp8 ? bytes_of(fp32) : bytes_of(scales);
  }
  std::int64_t groups() const { return ceil_div(cols, scheme->group); }
  std::vector<std::uint8_t> pack(RowOrder order) const {
    std::vector<std::uint8_t> blob(static_cast<std::size_t>(packed_bytes(*scheme, rows, cols, order)), 0xcc);
    moepack::pack(*scheme, order, rows, cols, codes.data(), scale_bytes().data(), exponent, blob.data());
    return blob;
  }
};

// Every code that the cell holds, weights of about 1 / sqrt(cols).
inline Matrix float_matrix(const Scheme& scheme, std::int64_t rows, std::int64_t cols, std::uint32_t seed) {
  Random random(seed);
  Matrix m{&scheme, rows, cols, static_cast<std::int32_t>(random.below(3)) - 1, {}, {}, {}, {}};
  while (static_cast<std::int64_t>(m.codes.size()) < rows * cols) {
    const auto code = static_cast<std::int8_t>(random.bits());
    if (scheme.cell == Cell::mxfp4) m.codes.push_back(static_cast<std::int8_t>(code & 15));
    if (scheme.cell == Cell::fp8 && is_code(scheme, code)) m.codes.push_back(code);
  }
  const int size = std::ilogb(std::sqrt(static_cast<float>(cols)) * (scheme.cell == Cell::fp8 ? 100.0f : 3.0f));
  for (std::int64_t i = 0; i < rows * m.groups(); ++i) {
    m.e8m0.push_back(static_cast<std::uint8_t>(126 - size + random.below(3)));
    m.fp32.push_back(std::ldexp(random.uniform(0.5f, 2.0f), -size));
  }
  return m;
}

// Scales of either sign where the cell has such.
inline Matrix matrix(const Scheme& scheme, std::int64_t rows, std::int64_t cols, std::uint32_t seed) {
  if (cell_info(scheme.cell).scale != ScaleType::fp16) return float_matrix(scheme, rows, cols, seed);
  Random random(seed);
  const int half_range = scheme.code_max;  // codes from -half_range - 1 on
  Matrix m{&scheme, rows, cols, -std::ilogb(static_cast<float>(half_range) * std::sqrt(static_cast<float>(cols))),
           {},      {},   {},   {}};
  for (std::int64_t i = 0; i < rows * cols; ++i)
    m.codes.push_back(static_cast<std::int8_t>(random.below(2 * half_range + 2) - half_range - 1));
  for (std::int64_t i = 0; i < rows * m.groups(); ++i)
    m.scales.push_back(half_from_float(random.uniform(0.5f, 2.0f) * (random.below(4) ? 1.0f : -1.0f)));
  return m;
}

// IEEE 802.3, bit by bit, of what follows the first `skip` bytes.
inline std::uint32_t crc32(const std::vector<std::uint8_t>& bytes, std::size_t skip) {
  std::uint32_t crc = 0xffffffffu;
  for (std::size_t i = skip; i < bytes.size(); ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

// The experts of a layer.
struct Layer {
  std::int64_t D, F, E;
  const Scheme* scheme;
  std::int64_t bytes13, bytes2;
  std::vector<std::uint8_t> w13, w2;
  std::vector<float> bias13, bias2;  // may be empty
  const char* layout = "moepack";

  Shape shape(std::int64_t tokens, std::int64_t top_k) const { return {tokens, D, F, E, top_k}; }
  ExpertAttributes attributes() const {
    ExpertAttributes a;
    a.scheme = scheme->name;
    a.layout = layout;
    a.activation = "silu";
    return a;
  }
  ExpertTensors tensors() const {
    return {w13.data(),
            w2.data(),
            bytes13,
            bytes2,
            bias13.empty() ? nullptr : bias13.data(),
            bias2.empty() ? nullptr : bias2.data()};
  }
  ExpertSizes sizes() const { return {E, bytes13, E, bytes2, -1, -1}; }
};

inline Layer layer(const Scheme& scheme, std::int64_t D, std::int64_t F, std::int64_t E, bool biases = false,
                   std::uint32_t seed = 1) {
  Layer l{D, F, E, &scheme, 0, 0, {}, {}, {}, {}};
  for (std::int64_t e = 0; e < E; ++e) {
    const std::uint32_t own = seed + 2 * static_cast<std::uint32_t>(e);
    const auto w13 = matrix(scheme, 2 * F, D, own).pack(RowOrder::gate_up);
    const auto w2 = matrix(scheme, D, F, own + 1).pack(RowOrder::plain);
    l.w13.insert(l.w13.end(), w13.begin(), w13.end());
    l.w2.insert(l.w2.end(), w2.begin(), w2.end());
  }
  l.bytes13 = static_cast<std::int64_t>(l.w13.size()) / E;
  l.bytes2 = static_cast<std::int64_t>(l.w2.size()) / E;
  if (biases) {
    Random random(seed + 12345);
    l.bias13 = random.floats(E * 2 * F);
    l.bias2 = random.floats(E * D);
  }
  return l;
}

// Which experts each token goes to.
struct Routing {
  std::int64_t T, K;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;

  Routing token(std::int64_t t) const {
    return {1,
            K,
            {ids.begin() + t * K, ids.begin() + (t + 1) * K},
            {weights.begin() + t * K, weights.begin() + (t + 1) * K}};
  }
};

inline Routing routing(std::int64_t T, std::int64_t K, std::int64_t E, std::uint32_t seed = 7) {
  Random random(seed);
  Routing r{T, K, {}, {}};
  for (std::int64_t t = 0; t < T; ++t) {
    const std::int64_t first = random.below(E);
    for (std::int64_t k = 0; k < K; ++k) {
      r.ids.push_back((first + k * (E > 2 ? 2 : 1) + (k * 2 >= E ? 1 : 0)) % E);
      r.weights.push_back(random.uniform(0.0f, 1.0f));
    }
  }
  return r;
}

// A tensor of one of the op's dtypes.
struct Values {
  DType dtype = DType::f32;
  std::vector<float> f32;
  std::vector<std::uint16_t> half;

  void* data() { return dtype == DType::f32 ? static_cast<void*>(f32.data()) : half.data(); }
  const void* data() const { return const_cast<Values*>(this)->data(); }
  std::vector<float> floats() const {
    if (dtype == DType::f32) return f32;
    std::vector<float> result;
    for (const std::uint16_t h : half) result.push_back(dtype == DType::bf16 ? float_from_bf16(h) : float_from_half(h));
    return result;
  }
};

inline Values values(const std::vector<float>& floats, DType dtype) {
  Values v;
  v.dtype = dtype;
  if (dtype == DType::f32) v.f32 = floats;
  if (dtype != DType::f32)
    for (const float f : floats) v.half.push_back(dtype == DType::bf16 ? bf16_from_float(f) : half_from_float(f));
  return v;
}

// quantized_experts with a workspace of exactly the promised size.
inline Status run_experts(const Layer& layer, const Values& x, const Routing& routing, int thread_count, Values& out) {
  const Shape shape = layer.shape(routing.T, routing.K);
  const ExpertAttributes attributes = layer.attributes();
  Workspace workspace(experts_workspace_bytes(shape, attributes, thread_count));
  return quantized_experts(shape, attributes, layer.tensors(), x.data(), x.dtype, routing.ids.data(),
                           routing.weights.data(), out.data(), workspace.base(), threads(thread_count));
}

// The same on fp32, where it has to succeed.
inline std::vector<float> experts(const Layer& layer, const std::vector<float>& x, const Routing& routing,
                                  int thread_count = 1) {
  Values out = values(std::vector<float>(x.size(), 12345.0f), DType::f32);
  const Status status = run_experts(layer, values(x, DType::f32), routing, thread_count, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return out.f32;
}

}  // namespace moepack::made
