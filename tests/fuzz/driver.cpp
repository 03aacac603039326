// Runs a target on made inputs for some time, where there is no libFuzzer. Input i of a seed is always the same:
//
//     TARGET [--seconds N] [--seed S] [--first I] [--count N]
//
// A finding ends the process; its last line says which input it was, and --seed S --first I --count 1 repeats it.
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "target.h"

// Findings of the sanitizers abort, as broken promises do: say_input() sees all. Their libraries look these up.
extern "C" {
[[gnu::visibility("default")]] const char* __asan_default_options() { return "abort_on_error=1"; }
[[gnu::visibility("default")]] const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
}

namespace {

struct Options {
  double seconds = 10;
  std::uint64_t seed = 1, first = 0, count = UINT64_MAX;
};

const char* program = "";
std::uint64_t current_seed, current_input;

void say_input() {
  std::fprintf(stderr, "finding: %s --seed %llu --first %llu --count 1\n", program,
               static_cast<unsigned long long>(current_seed), static_cast<unsigned long long>(current_input));
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--seconds") == 0) options.seconds = std::atof(argv[i + 1]);
    if (std::strcmp(argv[i], "--seed") == 0) options.seed = std::strtoull(argv[i + 1], nullptr, 0);
    if (std::strcmp(argv[i], "--first") == 0) options.first = std::strtoull(argv[i + 1], nullptr, 0);
    if (std::strcmp(argv[i], "--count") == 0) options.count = std::strtoull(argv[i + 1], nullptr, 0);
  }
  return options;
}

// From a few departures in zeros to bytes that are all random.
std::vector<std::uint8_t> make_input(std::uint64_t seed, std::uint64_t number) {
  std::seed_seq both{seed, seed >> 32, number, number >> 32};
  std::mt19937 random(both);
  std::vector<std::uint8_t> bytes(random() % 400);
  const unsigned departures = 1u << random() % 9;  // among 256
  for (auto& byte : bytes) byte = random() % 256 < departures ? static_cast<std::uint8_t>(random()) : 0;
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const Options options = parse(argc, argv);
  program = argv[0];
  current_seed = options.seed;
  std::signal(SIGABRT, [](int) { say_input(); });
  const Clock::time_point begin = Clock::now();
  const auto seconds = [begin] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  std::uint64_t ran = 0;
  for (; ran < options.count && seconds() < options.seconds; ++ran) {
    current_input = options.first + ran;
    const std::vector<std::uint8_t> bytes = make_input(options.seed, current_input);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  const moepack::fuzz::Reached& reached = moepack::fuzz::reached;
  std::printf("%s: seed %llu, %llu inputs in %.0f s, %lld refused, %lld accepted, no finding\n", program,
              static_cast<unsigned long long>(options.seed), static_cast<unsigned long long>(ran), seconds(),
              static_cast<long long>(reached.refused), static_cast<long long>(reached.accepted));
  const bool reaches = reached.accepted > 0 && reached.refused > 0;
  if (ran > 1000 && !reaches) std::fprintf(stderr, "%s: its inputs do not reach both answers\n", program);
  return ran > 1000 && !reaches;
}
