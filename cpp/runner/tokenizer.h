// Text to token ids and back, by the tokenizer library that ExecuTorch's own LLM runners use (the CMake package
// `tokenizers`). A build without it has token ids only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace runner {

class Tokenizer {
 public:
  // tokenizer.json of Hugging Face, or a SentencePiece model. Throws Failure.
  explicit Tokenizer(const std::string& path);
  ~Tokenizer();

  // With `begin_text`, the tokenizer's begin-of-text token comes first. Throws Failure.
  std::vector<std::int64_t> encode(const std::string& text, bool begin_text) const;

  // The bytes of a token that follows another; not always whole characters. Throws Failure.
  std::string decode(std::int64_t previous, std::int64_t token) const;

 private:
  struct Library;
  std::unique_ptr<Library> library_;
};

}  // namespace runner
