// Compares every instruction set that this CPU runs with the scalar kernel, bit for bit: schemes, shapes with tails,
// activations, batches, threads. Needs nothing but the core, so that it runs wherever the core compiles.
//
//     moepack_selftest [instruction set ...]
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "moepack/ffn.h"
#include "moepack/isa.h"
#include "moepack/packed.h"

namespace {

using namespace moepack;

struct Dimensions {
  std::int64_t D, F, E, K;
};

constexpr Dimensions kDimensions[] = {{128, 64, 4, 2}, {200, 72, 5, 3}, {33, 17, 3, 1}, {256, 300, 6, 6}, {1, 1, 1, 1}};
constexpr std::int64_t kTokens[] = {1, 2, 3, 4, 5, 7, 9, 40};
constexpr int kThreads[] = {1, 3};

ExpertAttributes attributes(std::string_view scheme, std::string_view activation) {
  ExpertAttributes a;
  a.scheme = scheme;
  a.layout = "moepack";
  a.activation = activation;
  if (activation == "swiglu_oai") {
    a.act_alpha = 1.702;
    a.act_limit = 7.0;
  }
  if (activation == "silu") a.up_softcap = 25.0;
  return a;
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<unsigned>(n)); }
  float normal() { return normal_(engine_); }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

std::vector<std::uint8_t> made_blob(const Scheme& scheme, std::int64_t rows, std::int64_t cols, RowOrder order,
                                    Random& random) {
  std::vector<std::int8_t> codes(static_cast<std::size_t>(rows * cols));
  for (auto& code : codes)
    code = static_cast<std::int8_t>(scheme.code_min + random.below(scheme.code_max - scheme.code_min + 1));
  std::vector<std::uint16_t> scales(static_cast<std::size_t>(rows * ceil_div(cols, scheme.group)));
  for (auto& scale : scales)
    scale = static_cast<std::uint16_t>(0x2000 + random.below(0x1000) + (random.below(2) << 15));
  std::vector<std::uint8_t> blob(static_cast<std::size_t>(packed_bytes(scheme, rows, cols, order)));
  pack(scheme, order, rows, cols, codes.data(), scales.data(), -3, blob.data());
  return blob;
}

struct Layer {
  Layer(const Scheme& scheme, const Dimensions& d, bool gated, Random& random) {
    for (std::int64_t e = 0; e < d.E; ++e) {
      append(w13, made_blob(scheme, gated ? 2 * d.F : d.F, d.D, gated ? RowOrder::gate_up : RowOrder::plain, random));
      append(w2, made_blob(scheme, d.D, d.F, RowOrder::plain, random));
    }
    const std::int64_t experts = d.E;
    tensors = {w13.data(), w2.data(), static_cast<std::int64_t>(w13.size()) / experts,
               static_cast<std::int64_t>(w2.size()) / experts};
  }

  static void append(std::vector<std::uint8_t>& all, const std::vector<std::uint8_t>& blob) {
    all.insert(all.end(), blob.begin(), blob.end());
  }

  std::vector<std::uint8_t> w13, w2;
  ExpertTensors tensors;
};

ParallelFor threads(int count) {
  if (count == 1) return serial();
  return {count,
          [](void*, int tasks, void (*body)(void*, int), void* argument) {
            std::vector<std::thread> workers;
            for (int i = 0; i < tasks; ++i) workers.emplace_back(body, argument, i);
            for (auto& worker : workers) worker.join();
          },
          nullptr};
}

struct Batch {
  Batch(const Dimensions& d, std::int64_t tokens, Random& random) {
    for (std::int64_t i = 0; i < tokens * d.D; ++i)
      x.push_back(random.below(50) ? random.normal() : 30 * random.normal());
    for (std::int64_t i = 0; i < tokens * d.K; ++i) {
      ids.push_back(random.below(static_cast<int>(d.E)));
      weights.push_back(random.normal());
    }
  }

  std::vector<float> x;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
};

std::vector<float> run(const char* isa, const Dimensions& d, const ExpertAttributes& a, const Layer& layer,
                       const Batch& batch, std::int64_t first, std::int64_t tokens, int thread_count) {
  const Shape shape{tokens, d.D, d.F, d.E, d.K};
  const ParallelFor parallel = threads(thread_count);
  std::vector<std::uint8_t> memory(experts_workspace_bytes(shape, a, thread_count) + 64);
  std::uint8_t* workspace = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
  std::vector<float> out(static_cast<std::size_t>(tokens * d.D));
  Status status = force_isa(isa);
  if (status.ok())
    status = quantized_experts(shape, a, layer.tensors, batch.x.data() + first * d.D, DType::f32,
                               batch.ids.data() + first * d.K, batch.weights.data() + first * d.K, out.data(),
                               workspace, parallel);
  if (!status.ok()) std::printf("%s: %s\n", isa, status.message());
  return out;
}

struct Counts {
  int passed = 0, failed = 0;
  std::uint64_t digest = 0xcbf29ce484222325;  // FNV-1a of all scalar results: the same on every machine

  void digest_of(const std::vector<float>& values) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (std::size_t i = 0; i < values.size() * sizeof(float); ++i) digest = (digest ^ bytes[i]) * 0x100000001b3;
  }

  void count(bool same, const std::string& what) {
    ++(same ? passed : failed);
    if (!same) std::printf("FAILED %s\n", what.c_str());
  }
};

bool same(const std::vector<float>& a, const float* b) {
  return std::memcmp(a.data(), b, a.size() * sizeof(float)) == 0;
}

void compare(const std::vector<std::string>& isas, const Scheme& scheme, std::string_view activation,
             const Dimensions& d, Counts& counts) {
  Random random(static_cast<unsigned>(d.D * 31 + d.F + scheme.group));
  const Layer layer(scheme, d, activation != "relu2", random);
  const ExpertAttributes a = attributes(scheme.name, activation);
  for (const std::int64_t tokens : kTokens) {
    const Batch batch(d, tokens, random);
    const std::vector<float> expected = run("scalar", d, a, layer, batch, 0, tokens, 1);
    counts.digest_of(expected);
    for (const std::string& isa : isas) {
      const std::string what = isa + " " + std::string(scheme.name) + " " + std::string(activation) +
                               " D=" + std::to_string(d.D) + " F=" + std::to_string(d.F) +
                               " T=" + std::to_string(tokens);
      for (const int count : kThreads)
        counts.count(same(run(isa.c_str(), d, a, layer, batch, 0, tokens, count), expected.data()), what);
      const std::vector<float> last = run(isa.c_str(), d, a, layer, batch, tokens - 1, 1, 1);
      counts.count(same(last, expected.data() + (tokens - 1) * d.D), what + " last token alone");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> isas(argv + 1, argv + argc);
  if (isas.empty())
    for (int i = 0; i < isa_count(); ++i)
      if (isa_info(i).supported) isas.emplace_back(isa_info(i).name);
  for (const std::string& isa : isas) {
    if (const Status status = force_isa(isa.c_str()); !status.ok()) {
      std::fprintf(stderr, "%s\n", status.message());
      return 2;
    }
    std::printf("%s against scalar\n", isa.c_str());
  }
  Counts counts;
  for (const Scheme* scheme = schemes_begin(); scheme != schemes_end(); ++scheme)
    for (const Dimensions& d : kDimensions) compare(isas, *scheme, "silu", d, counts);
  for (const std::string_view activation : {"gelu_tanh", "swiglu_oai", "relu2"})
    compare(isas, *find_scheme("int4-g32"), activation, kDimensions[1], counts);
  std::printf("digest %016llx\n%d passed, %d failed\n", static_cast<unsigned long long>(counts.digest), counts.passed,
              counts.failed);
  return counts.failed == 0 ? 0 : 1;
}
