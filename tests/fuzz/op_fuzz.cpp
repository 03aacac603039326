// Both operators, from the arguments that a binding reads to the numbers: attributes, shapes, headers, ids and payloads
// of any kind. Either an error and an untouched output, or the same bits from every instruction set and thread count.
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "arguments.h"
#include "choices.h"
#include "half.h"
#include "made_call.h"
#include "memory.h"
#include "moepack/isa.h"
#include "started_threads.h"
#include "target.h"

namespace moepack::fuzz {
namespace {

// Its workers one after the other, the last first: the order is the pool's affair.
ParallelFor backwards(int threads) {
  return {threads,
          [](void*, int count, void (*body)(void*, int), void* argument) {
            for (int i = count - 1; i >= 0; --i) body(argument, i);
          },
          nullptr};
}

struct Result {
  std::string message;  // empty: computed
  std::vector<std::uint8_t> out;
};

Result run(const ops::Call& call, const char* isa, const ParallelFor& parallel) {
  constexpr std::size_t most = 1 << 26;
  MOEPACK_PROMISE(force_isa(isa).ok());
  Memory out(static_cast<std::size_t>(call.shape.T * call.shape.D * element_size(call.x.element)));
  const std::vector<std::uint8_t> before(out.data(), out.data() + out.size());
  const std::size_t bytes = ops::workspace_bytes(call, parallel.threads);
  if (bytes > most) return {"too large to try", {}};
  Memory workspace(bytes, 64);
  const Status status = ops::run(call, out.data(), workspace.data(), parallel);
  MOEPACK_PROMISE(status.ok() == (status.message()[0] == '\0'));
  MOEPACK_PROMISE(status.ok() || std::memcmp(out.data(), before.data(), out.size()) == 0);
  return {status.message(), {out.data(), out.data() + out.size()}};
}

// Equal bits, where NaN equals NaN.
bool same(const Result& a, const Result& b, Element element) {
  if (a.message != b.message || a.out.size() != b.out.size()) return false;
  const auto number = [element](const std::uint8_t* at) {
    if (element == Element::float32) {
      float value;
      std::memcpy(&value, at, sizeof value);
      return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return element == Element::bfloat16 ? float_from_bf16(bits) : float_from_half(bits);
  };
  const std::size_t size = element == Element::float32 ? 4 : 2;
  for (std::size_t i = 0; i < a.out.size(); i += size) {
    const float x = number(&a.out[i]), y = number(&b.out[i]);
    if (bits_of(x) != bits_of(y) && (x == x || y == y)) return false;
  }
  return true;
}

void test(Choices& choices) {
  const Plan plan = make_plan(choices);
  const int odds = choices.pick({12, 60, 256});
  const int threads = 1 + static_cast<int>(choices.below(4));
  const bool started = choices.one_in(16);
  MadeStack in(choices, plan, odds);
  ops::Call call = ops::read_call(in, plan.routed);
  const Status status = ops::check(call);
  MOEPACK_PROMISE(status.ok() == (status.message()[0] == '\0'));
  MOEPACK_PROMISE(status.ok() || in.departed());
  if (!status.ok() || in.oversized()) {
    ++reached.refused;
    return;
  }
  const auto element = static_cast<Element>(call.x.element);
  const Result expected = run(call, "scalar", serial());
  MOEPACK_PROMISE(expected.message.empty() || in.departed());
  ++(expected.message.empty() ? reached.accepted : reached.refused);
  for (int i = 0; i < isa_count(); ++i)
    if (isa_info(i).supported)
      MOEPACK_PROMISE(
          same(run(call, isa_info(i).name, started ? made::threads(threads) : backwards(threads)), expected, element));
}

}  // namespace
}  // namespace moepack::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moepack::fuzz::Choices choices(data, size);
  moepack::fuzz::test(choices);
  return 0;
}
