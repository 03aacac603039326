#include "tokenizer.h"

#include <pytorch/tokenizers/hf_tokenizer.h>
#include <pytorch/tokenizers/sentencepiece.h>

#include <exception>

#include "failure.h"

namespace runner {

struct Tokenizer::Library {
  std::string path;
  std::unique_ptr<tokenizers::Tokenizer> tokenizer;
};

namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The library throws for some broken files and returns an error for others.
bool loads(tokenizers::Tokenizer& tokenizer, const std::string& path) {
  try {
    return tokenizer.load(path) == tokenizers::Error::Ok;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

Tokenizer::Tokenizer(const std::string& path) : library_(new Library{path, nullptr}) {
  if (ends_with(path, ".json")) {
    library_->tokenizer = std::make_unique<tokenizers::HFTokenizer>();
  } else {
    library_->tokenizer = std::make_unique<tokenizers::SPTokenizer>();
  }
  if (!loads(*library_->tokenizer, path))
    throw Failure(path + ": is no tokenizer that can be read; expected tokenizer.json or a SentencePiece model");
}

Tokenizer::~Tokenizer() = default;

std::vector<std::int64_t> Tokenizer::encode(const std::string& text, bool begin_text) const {
  const auto ids = library_->tokenizer->encode(text, begin_text ? 1 : 0, 0);
  if (!ids.ok()) throw Failure(library_->path + ": cannot encode the prompt");
  return {ids->begin(), ids->end()};
}

std::string Tokenizer::decode(std::int64_t previous, std::int64_t token) const {
  const auto text =
      library_->tokenizer->decode(static_cast<std::uint64_t>(previous), static_cast<std::uint64_t>(token));
  if (!text.ok()) throw Failure(library_->path + ": has no token " + std::to_string(token));
  return *text;
}

}  // namespace runner
