// A program that moepack or ExecuTorch's export_llm wrote, as a function from tokens to the next one.
#pragma once

#include <executorch/extension/module/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "options.h"

namespace runner {

class LanguageModel {
 public:
  // Maps the .pte and, if named, the .ptd with its weights; copies nothing but what --huge-pages asks for. Throws
  // Failure.
  explicit LanguageModel(const Options& options);

  // Feeds tokens of the sequence from `position` on; position 0 begins a new one. Returns the likeliest next token.
  // Throws Failure on ids outside the vocabulary and beyond the context.
  std::int64_t next_token(const std::vector<std::int64_t>& tokens, std::int64_t position);

  std::int64_t context() const { return context_; }
  bool ends_text(std::int64_t token) const { return ends_.count(token) != 0; }

 private:
  void load(const Options& options);
  std::vector<std::int64_t> constants(const std::string& method);
  void read_inputs();
  void check(const std::vector<std::int64_t>& tokens, std::int64_t position) const;
  std::int64_t run(std::vector<std::int64_t> tokens, std::int64_t position);
  std::vector<std::int64_t> positions(std::int64_t first, std::int64_t count) const;

  std::string path_;
  std::unique_ptr<executorch::extension::Module> module_;
  std::int64_t context_ = 0;
  std::int64_t vocabulary_ = 0;
  std::unordered_set<std::int64_t> ends_;
  // How many tokens one call takes.
  std::int64_t most_tokens_ = 1;
  // moepack's exporter wants the position of every token, export_llm that of the first.
  bool all_positions_ = false;
};

}  // namespace runner
