// Compiled where CMake found no tokenizer library.
#include "failure.h"
#include "tokenizer.h"

namespace runner {

struct Tokenizer::Library {};

Tokenizer::Tokenizer(const std::string&) {
  throw Failure(
      "--tokenizer: this build has none, for CMake found no package 'tokenizers'; build with it, or give token ids on "
      "stdin instead");
}

Tokenizer::~Tokenizer() = default;

std::vector<std::int64_t> Tokenizer::encode(const std::string&, bool) const { return {}; }

std::string Tokenizer::decode(std::int64_t, std::int64_t) const { return {}; }

}  // namespace runner
