// Generates tokens with a packed Mixture-of-Experts model: ids on stdin, ids on stdout, speed on stderr.
//
//   moepack_runner model.pte [--weights model.ptd] [--max-new-tokens N]
//
// ExecuTorch's wheel has no tokenizer for C++, so the text is turned into ids, and back, elsewhere: by the tokenizer
// that an app has anyway, or by the one of Python as in docs/how-to/integrate-cpp.md.
#include <charconv>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "language_model.h"

namespace runner {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string program;
  std::string weights;
  std::int64_t max_new_tokens = -1;  // until the end of the text or of the context
};

std::int64_t number(std::string_view name, const std::string& text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, value);
  if (read.ec != std::errc() || read.ptr != end || value < 1) {
    throw Failure(std::string(name) + " is '" + text + "'; expected a number of at least 1");
  }
  return value;
}

Options parse(const std::vector<std::string>& arguments) {
  Options found;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    const bool is_option = name.rfind("--", 0) == 0;
    if (!is_option && found.program.empty()) {
      found.program = name;
      continue;
    }
    const bool is_known = name == "--weights" || name == "--max-new-tokens";
    if (!is_known) throw Failure("unknown argument '" + name + "'");
    if (++i == arguments.size()) throw Failure(name + " needs a value");
    if (name == "--weights") found.weights = arguments[i];
    if (name == "--max-new-tokens") found.max_new_tokens = number(name, arguments[i]);
  }
  if (found.program.empty()) {
    throw Failure("usage: moepack_runner model.pte [--weights model.ptd] [--max-new-tokens N] < ids");
  }
  return found;
}

std::vector<std::int64_t> read_ids(std::istream& input) {
  std::vector<std::int64_t> ids;
  for (std::int64_t id = 0; input >> id;) ids.push_back(id);
  if (!input.eof()) throw Failure("stdin: expected token ids, numbers between spaces");
  if (ids.empty()) throw Failure("stdin: no token ids; the prompt is read from there");
  return ids;
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void generate(LanguageModel& model, const std::vector<std::int64_t>& prompt, std::int64_t limit) {
  auto start = Clock::now();
  std::int64_t token = model.next_token(prompt, 0);
  const double prefill = seconds_since(start);
  auto position = static_cast<std::int64_t>(prompt.size());
  std::int64_t count = 0;
  std::int64_t steps = 0;
  start = Clock::now();
  while (!model.ends_text(token)) {
    std::printf("%s%lld", count == 0 ? "" : " ", static_cast<long long>(token));
    std::fflush(stdout);
    if (++count == limit || position >= model.context()) break;
    token = model.next_token({token}, position++);
    ++steps;
  }
  const double decode = seconds_since(start);
  std::printf("\n");
  std::fprintf(stderr, "prompt: %zu tokens, %.1f tokens/s\n", prompt.size(), prompt.size() / prefill);
  if (steps > 0)
    std::fprintf(stderr, "new: %lld tokens, %.1f tokens/s\n", static_cast<long long>(count), steps / decode);
}

int run(const std::vector<std::string>& arguments) {
  try {
    const Options options = parse(arguments);
    const std::vector<std::int64_t> prompt = read_ids(std::cin);
    LanguageModel model(options.program, options.weights);
    generate(model, prompt, options.max_new_tokens);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moepack_runner: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace runner

int main(int argc, char** argv) { return runner::run({argv + 1, argv + argc}); }
