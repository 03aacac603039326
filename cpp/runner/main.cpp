// Generates text with a packed Mixture-of-Experts model, greedily: text or token ids on stdout as they come, speed on
// stderr. options.cpp has the command line; docs/how-to/integrate-cpp.md explains it.
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "failure.h"
#include "huge_pages.h"
#include "language_model.h"
#include "number.h"
#include "options.h"
#include "runtime_log.h"
#include "threads.h"
#include "tokenizer.h"
#include "verification.h"
#include "whole_characters.h"

namespace runner {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::int64_t> read_ids(std::istream& input) {
  std::vector<std::int64_t> ids;
  for (std::string word; input >> word;) {
    const auto id = number(word);
    if (!id)
      throw Failure("stdin: expected token ids, numbers between spaces; word " + std::to_string(ids.size() + 1) +
                    " is none");
    ids.push_back(*id);
  }
  if (ids.empty()) throw Failure("stdin: no token ids; the prompt is read from there");
  return ids;
}

// Writes tokens as they come: as text with a tokenizer, else as numbers.
class Output {
 public:
  Output(const Tokenizer* tokenizer, std::int64_t previous) : tokenizer_(tokenizer), previous_(previous) {}

  void write(std::int64_t token) {
    if (tokenizer_) {
      const std::string text = text_.add(tokenizer_->decode(previous_, token));
      std::fwrite(text.data(), 1, text.size(), stdout);
    } else {
      std::printf("%s%lld", is_first_ ? "" : " ", static_cast<long long>(token));
    }
    std::fflush(stdout);
    previous_ = token;
    is_first_ = false;
  }

  void end() { std::printf("%s\n", text_.end().c_str()); }

 private:
  const Tokenizer* tokenizer_;
  std::int64_t previous_;
  WholeCharacters text_;
  bool is_first_ = true;
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void report(const Options& options) {
  if (options.verify) {
    if (verified_matrices() == 0)
      throw Failure(options.program + ": runs no experts with checksums; nothing to verify");
    std::fprintf(stderr, "verified: %zu packed matrices\n", verified_matrices());
  }
  const long long huge = options.huge_pages ? huge_page_bytes() : -1;
  if (huge >= 0) std::fprintf(stderr, "on huge pages: %lld MiB\n", huge >> 20);
}

void generate(LanguageModel& model, const std::vector<std::int64_t>& prompt, const Options& options, Output output) {
  auto start = Clock::now();
  std::int64_t token = model.next_token(prompt, 0);
  const double prefill = seconds_since(start);
  report(options);
  auto position = static_cast<std::int64_t>(prompt.size());
  std::int64_t count = 0;
  std::int64_t steps = 0;
  start = Clock::now();
  while (!model.ends_text(token)) {
    output.write(token);
    if (++count == options.max_new_tokens || position >= model.context()) break;
    token = model.next_token({token}, position++);
    ++steps;
  }
  const double decode = seconds_since(start);
  output.end();
  std::fprintf(stderr, "prompt: %zu tokens, %.1f tokens/s\n", prompt.size(), prompt.size() / prefill);
  if (steps > 0)
    std::fprintf(stderr, "new: %lld tokens, %.1f tokens/s\n", static_cast<long long>(count), steps / decode);
}

int run(const std::vector<std::string>& arguments) {
  keep_log();
  try {
    const Options options = parse(arguments);
    if (options.help) {
      std::fputs(kUsage, stdout);
      return 0;
    }
    std::unique_ptr<Tokenizer> tokenizer;
    if (!options.tokenizer.empty()) tokenizer = std::make_unique<Tokenizer>(options.tokenizer);
    const std::vector<std::int64_t> prompt =
        tokenizer ? tokenizer->encode(options.prompt, options.begin_text) : read_ids(std::cin);
    if (options.threads > 0) set_threads(options.threads);
    LanguageModel model(options);
    generate(model, prompt, options, Output(tokenizer.get(), prompt.empty() ? 0 : prompt.back()));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moepack_runner: %s\n", one_line(error.what()).c_str());
    return 1;
  }
}

}  // namespace
}  // namespace runner

int main(int argc, char** argv) { return runner::run({argv + 1, argv + argc}); }
