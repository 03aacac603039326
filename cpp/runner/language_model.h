// A program that moepack or ExecuTorch's export_llm wrote, as a function from tokens to logits.
#pragma once

#include <executorch/extension/module/module.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

namespace runner {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class LanguageModel {
 public:
  // Maps the .pte and, unless empty, the .ptd with its weights; nothing is copied. Throws Failure.
  LanguageModel(const std::string& program, const std::string& weights);

  // Feeds tokens of the sequence from `position` on; position 0 begins a new one. Returns the likeliest next token.
  // Throws Failure on ids outside the vocabulary and beyond the context.
  std::int64_t next_token(const std::vector<std::int64_t>& tokens, std::int64_t position);

  std::int64_t context() const { return context_; }
  bool ends_text(std::int64_t token) const { return ends_.count(token) != 0; }

 private:
  std::vector<std::int64_t> constants(const std::string& method);
  void read_inputs();
  std::vector<std::int64_t> positions(std::int64_t first, std::int64_t count) const;

  std::string path_;
  executorch::extension::Module module_;
  std::int64_t context_ = 0;
  std::int64_t vocabulary_ = 0;
  std::unordered_set<std::int64_t> ends_;
  // moepack's exporter wants the position of every token, export_llm that of the first.
  bool all_positions_ = false;
};

}  // namespace runner
