#include "layer.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "moepack/isa.h"

namespace moepack::selftest {
namespace {

void append(std::vector<std::uint8_t>& all, const std::vector<std::uint8_t>& part) {
  all.insert(all.end(), part.begin(), part.end());
}

// About 2^-7, of either sign where the type has one; little-endian.
std::vector<std::uint8_t> made_scale(ScaleType type, Random& random) {
  const int sign = random.below(2) << 7, byte = random.below(256);
  switch (type) {
    case ScaleType::fp16:
      return {static_cast<std::uint8_t>(byte), static_cast<std::uint8_t>(0x20 + random.below(0x10) + sign)};
    case ScaleType::e8m0:
      return {static_cast<std::uint8_t>(118 + random.below(4))};
    case ScaleType::fp32:
      return {static_cast<std::uint8_t>(byte), static_cast<std::uint8_t>(random.below(256)),
              static_cast<std::uint8_t>(random.below(256)), static_cast<std::uint8_t>(0x3b + sign)};
  }
  return {};
}

std::vector<std::uint8_t> made_blob(const Scheme& scheme, std::int64_t rows, std::int64_t cols, RowOrder order,
                                    Random& random) {
  std::vector<std::int8_t> codes(static_cast<std::size_t>(rows * cols));
  for (auto& code : codes) {
    code = static_cast<std::int8_t>(scheme.code_min + random.below(scheme.code_max - scheme.code_min + 1));
    if (!is_code(scheme, code)) code = 0;
  }
  std::vector<std::uint8_t> scales;
  for (std::int64_t i = 0; i < rows * ceil_div(cols, scheme.group); ++i)
    append(scales, made_scale(cell_info(scheme.cell).scale, random));
  std::vector<std::uint8_t> blob(static_cast<std::size_t>(packed_bytes(scheme, rows, cols, order)));
  pack(scheme, order, rows, cols, codes.data(), scales.data(), -3, blob.data());
  return blob;
}

void append_int(std::vector<std::uint8_t>& all, int value) {
  for (int shift = 0; shift < 32; shift += 8) all.push_back(static_cast<std::uint8_t>(value >> shift));
}

// The layout "torchao": all bytes are codes, and the sums behind the scales are not looked at.
std::vector<std::uint8_t> made_universal_blob(const Scheme& scheme, std::int64_t rows, std::int64_t cols,
                                              Random& random) {
  const int bits = cell_info(scheme.cell).bits;
  std::vector<std::uint8_t> blob;
  for (const int field : {6712, 1, bits, 0, 0, 8, 16, 2, 0, 0, 0, 0, 0, 0, 0, 0}) append_int(blob, field);
  for (std::int64_t group = 0; group < rows / 8 * (cols / scheme.group); ++group) {
    for (int i = 0; i < scheme.group * bits; ++i) blob.push_back(static_cast<std::uint8_t>(random.below(256)));
    for (int row = 0; row < 8; ++row) append(blob, made_scale(ScaleType::fp32, random));
    for (int row = 0; row < 8; ++row) append_int(blob, random.below(1000));
  }
  return blob;
}

ParallelFor threads(int count) {
  if (count == 1) return serial();
  return {count,
          [](void*, int tasks, void (*body)(void*, int), void* argument) {
            std::vector<std::thread> workers;
            workers.reserve(static_cast<std::size_t>(tasks));
            for (int i = 0; i < tasks; ++i) workers.emplace_back(body, argument, i);
            for (auto& worker : workers) worker.join();
          },
          nullptr};
}

}  // namespace

Layer::Layer(const Dimensions& d, const ExpertAttributes& a, Random& random) {
  const Scheme& scheme = *find_scheme(a.scheme);
  const bool gated = a.activation != "relu2";
  const auto made = [&](std::int64_t rows, std::int64_t cols, RowOrder order) {
    return a.layout == "torchao" ? made_universal_blob(scheme, rows, cols, random)
                                 : made_blob(scheme, rows, cols, order, random);
  };
  for (std::int64_t e = 0; e < d.E; ++e) {
    append(w13, made(gated ? 2 * d.F : d.F, d.D, gated ? RowOrder::gate_up : RowOrder::plain));
    append(w2, made(d.D, d.F, RowOrder::plain));
  }
  const std::int64_t experts = d.E;
  tensors = {w13.data(), w2.data(), static_cast<std::int64_t>(w13.size()) / experts,
             static_cast<std::int64_t>(w2.size()) / experts};
}

Batch::Batch(const Dimensions& d, std::int64_t tokens, Random& random) {
  for (std::int64_t i = 0; i < tokens * d.D; ++i)
    x.push_back(random.below(50) ? random.normal() : 30 * random.normal());
  for (std::int64_t i = 0; i < tokens * d.K; ++i) {
    ids.push_back(random.below(static_cast<int>(d.E)));
    weights.push_back(random.normal());
  }
}

ExpertAttributes attributes(std::string_view scheme, std::string_view activation, std::string_view layout) {
  ExpertAttributes a;
  a.scheme = scheme;
  a.layout = layout;
  a.activation = activation;
  if (activation == "swiglu_oai") {
    a.act_alpha = 1.702;
    a.act_limit = 7.0;
  }
  if (activation == "silu") a.up_softcap = 25.0;
  return a;
}

Call::Call(const Dimensions& d, const ExpertAttributes& a, const Layer& layer, const Batch& batch, std::int64_t first,
           std::int64_t tokens, int thread_count)
    : shape_{tokens, d.D, d.F, d.E, d.K},
      attributes_(a),
      tensors_(layer.tensors),
      x_(batch.x.data() + first * d.D),
      ids_(batch.ids.data() + first * d.K),
      weights_(batch.weights.data() + first * d.K),
      parallel_(threads(thread_count)),
      memory_(experts_workspace_bytes(shape_, a, thread_count) + 64),
      workspace_(memory_.data() + (64 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 64)),
      out_(static_cast<std::size_t>(tokens * d.D)) {}

void Call::operator()() {
  const Status status = quantized_experts(shape_, attributes_, tensors_, x_, DType::f32, ids_, weights_, out_.data(),
                                          workspace_, parallel_);
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message());
  std::exit(2);
}

std::vector<float> Call::on(const std::string& isa) {
  force(isa);
  (*this)();
  return out_;
}

void force(const std::string& isa) {
  const Status status = force_isa(isa.c_str());
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message());
  std::exit(2);
}

bool same(const std::vector<float>& a, const float* b) {
  return std::memcmp(a.data(), b, a.size() * sizeof(float)) == 0;
}

}  // namespace moepack::selftest
