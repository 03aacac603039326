#include "one_op.h"

#include <chrono>
#include <cstdio>
#include <limits>
#include <string>

#include "moepack/isa.h"

namespace moepack::selftest {
namespace {

#define MOEPACK_TEXT_OF(x) #x
#define MOEPACK_TEXT(x) MOEPACK_TEXT_OF(x)
#if defined(__clang__)
constexpr const char* kCompiler = "clang " MOEPACK_TEXT(__clang_major__);
#elif defined(__GNUC__)
constexpr const char* kCompiler = "gcc " MOEPACK_TEXT(__GNUC__);
#else
constexpr const char* kCompiler = "unknown";
#endif

// Every expert gets tokens * K / E rows, to within one.
Batch evenly_routed(const Dimensions& d, std::int64_t tokens, Random& random) {
  Batch batch(d, tokens, random);
  for (std::int64_t i = 0; i < tokens * d.K; ++i) batch.ids[static_cast<std::size_t>(i)] = i % d.E;
  return batch;
}

void print(const OneOp& op, double seconds) {
  const Dimensions& d = op.dimensions;
  const double macs = static_cast<double>(3 * op.tokens * d.K * d.D * d.F);
  std::printf("{\"isa\": \"%s\", \"scheme\": \"%s\", \"D\": %lld, \"F\": %lld, \"E\": %lld, \"K\": %lld, ", op.isa,
              std::string(op.scheme).c_str(), static_cast<long long>(d.D), static_cast<long long>(d.F),
              static_cast<long long>(d.E), static_cast<long long>(d.K));
  std::printf("\"tokens\": %lld, \"macs\": %.0f, \"ms\": %.4g, \"gmac_per_s\": %.4g}\n",
              static_cast<long long>(op.tokens), macs, 1e3 * seconds, macs / seconds / 1e9);
}

}  // namespace

bool run_one_op(const OneOp& op) {
  const Dimensions& d = op.dimensions;
  const Scheme* scheme = find_scheme(op.scheme);
  if (!scheme || op.tokens < 1 || op.calls < 1 || d.D < 1 || d.F < 1 || d.K < 1 || d.E < d.K) {
    std::fprintf(stderr, "op: scheme one of %s; tokens, calls, D, F, K at least 1, E at least K\n", scheme_names());
    return false;
  }
  Random random(1);
  const ExpertAttributes a = attributes(op.scheme, "silu");
  const Layer layer(d, a, random);
  const Batch batch = evenly_routed(d, op.tokens, random);
  Call call(d, a, layer, batch, 0, op.tokens, 1);
  const std::vector<float> expected = call.on("scalar");
  force(op.isa);

  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < op.calls; ++i) {
    const auto before = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - before;
    if (took.count() < best) best = took.count();
  }
  if (!same(call.out(), expected.data())) {
    std::fprintf(stderr, "%s %s: the result differs from the scalar kernel's\n", op.isa,
                 std::string(op.scheme).c_str());
    return false;
  }
  print(op, best);
  return true;
}

void list() {
  std::printf("{\"compiler\": \"%s\", \"isas\": {", kCompiler);
  for (int i = 0; i < isa_count(); ++i)
    std::printf("%s\"%s\": %s", i ? ", " : "", isa_info(i).name, isa_info(i).supported ? "true" : "false");
  std::printf("}, \"schemes\": [");
  for (const Scheme* scheme = schemes_begin(); scheme != schemes_end(); ++scheme)
    std::printf("%s\"%s\"", scheme == schemes_begin() ? "" : ", ", std::string(scheme->name).c_str());
  std::printf("]}\n");
}

}  // namespace moepack::selftest
