// Compares every instruction set that this CPU runs with the scalar kernel, bit for bit: schemes, layouts, shapes with
// tails, activations, batches, threads. Needs nothing but the core, so that it runs wherever the core compiles.
//
//     moepack_selftest [instruction set ...]
//     moepack_selftest list
//     moepack_selftest op ISA SCHEME TOKENS CALLS [D F E K]    times one operator
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "layer.h"
#include "moepack/isa.h"
#include "one_op.h"

namespace {

using namespace moepack;
using namespace moepack::selftest;

constexpr Dimensions kDimensions[] = {{128, 64, 4, 2}, {200, 72, 5, 3}, {33, 17, 3, 1}, {256, 300, 6, 6}, {1, 1, 1, 1}};
constexpr Dimensions kWholeGroups = {256, 128, 3, 2};  // what the layout "torchao" can hold
constexpr std::int64_t kTokens[] = {1, 2, 3, 4, 5, 7, 9, 40};
constexpr int kThreads[] = {1, 3};

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

void compare(const std::vector<std::string>& isas, const ExpertAttributes& a, const Dimensions& d, Counts& counts) {
  Random random(static_cast<unsigned>(d.D * 31 + d.F + find_scheme(a.scheme)->group));
  const Layer layer(d, a, random);
  for (const std::int64_t tokens : kTokens) {
    const Batch batch(d, tokens, random);
    const std::vector<float> expected = Call(d, a, layer, batch, 0, tokens, 1).on("scalar");
    counts.digest_of(expected);
    for (const std::string& isa : isas) {
      const std::string what = isa + " " + std::string(a.scheme) + " " + std::string(a.layout) + " " +
                               std::string(a.activation) + " D=" + std::to_string(d.D) + " F=" + std::to_string(d.F) +
                               " T=" + std::to_string(tokens);
      for (const int count : kThreads)
        counts.count(same(Call(d, a, layer, batch, 0, tokens, count).on(isa), expected.data()), what);
      const std::vector<float> last = Call(d, a, layer, batch, tokens - 1, 1, 1).on(isa);
      counts.count(same(last, expected.data() + (tokens - 1) * d.D), what + " last token alone");
    }
  }
}

int compare_all(std::vector<std::string> isas) {
  if (isas.empty())
    for (int i = 0; i < isa_count(); ++i)
      if (isa_info(i).supported) isas.emplace_back(isa_info(i).name);
  for (const std::string& isa : isas) {
    force(isa);
    std::printf("%s against scalar\n", isa.c_str());
  }
  Counts counts;
  for (const Scheme* scheme = schemes_begin(); scheme != schemes_end(); ++scheme)
    for (const Dimensions& d : kDimensions) compare(isas, attributes(scheme->name, "silu"), d, counts);
  for (const std::string_view activation : {"gelu_tanh", "swiglu_oai", "relu2"})
    compare(isas, attributes("int4-g32", activation), kDimensions[1], counts);
  for (const Scheme* scheme = schemes_begin(); scheme != schemes_end(); ++scheme)
    if (cell_info(scheme->cell).scale == ScaleType::fp16)
      compare(isas, attributes(scheme->name, "silu", "torchao"), kWholeGroups, counts);
  std::printf("digest %016llx\n%d passed, %d failed\n", static_cast<unsigned long long>(counts.digest), counts.passed,
              counts.failed);
  return counts.failed == 0 ? 0 : 1;
}

// Zero for what is no number, which no size may be.
std::int64_t number(const std::string& word) {
  char* end = nullptr;
  const long long value = std::strtoll(word.c_str(), &end, 10);
  return *end == '\0' ? value : 0;
}

int one_op(const std::vector<std::string>& words) {
  if (words.size() != 5 && words.size() != 9) {
    std::fprintf(stderr, "moepack_selftest op ISA SCHEME TOKENS CALLS [D F E K]\n");
    return 2;
  }
  OneOp op{words[1].c_str(), words[2], number(words[3]), static_cast<int>(number(words[4]))};
  if (words.size() == 9) op.dimensions = {number(words[5]), number(words[6]), number(words[7]), number(words[8])};
  return run_one_op(op) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty() || (words[0] != "op" && words[0] != "list")) return compare_all(words);
  if (words[0] == "op") return one_op(words);
  list();
  return 0;
}
