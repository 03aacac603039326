// Text arrives in tokens, and a token may end inside a UTF-8 character.
#pragma once

#include <cstddef>
#include <string>

namespace runner {

// Bytes in, whole characters out. Bytes that are no UTF-8 become U+FFFD, so that what is given out always is text.
class WholeCharacters {
 public:
  // The text that is complete now: nothing of a character whose last bytes are still to come.
  std::string add(const std::string& bytes) {
    pending_ += bytes;
    std::string text;
    std::size_t at = 0;
    while (at < pending_.size()) {
      const std::size_t size = size_of(pending_[at]);
      const std::size_t found = found_at(at, size);
      if (size != kNone && found < size && at + found == pending_.size()) break;
      text += found == size ? pending_.substr(at, size) : kReplacement;
      at += found;
    }
    pending_.erase(0, at);
    return text;
  }

  // At the end: U+FFFD for a character that was never finished.
  std::string end() {
    const bool broken = !pending_.empty();
    pending_.clear();
    return broken ? kReplacement : "";
  }

 private:
  static constexpr char kReplacement[] = "\xEF\xBF\xBD";
  static constexpr std::size_t kNone = 5;  // more than any character has: never found in full

  // Of the character that begins with `first`.
  static std::size_t size_of(char first) {
    const auto byte = static_cast<unsigned char>(first);
    if (byte < 0x80) return 1;
    if (byte < 0xC2 || byte > 0xF4) return kNone;
    return byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : 2;
  }

  // How many bytes at `at` can belong to a character of `size`, at least one.
  std::size_t found_at(std::size_t at, std::size_t size) const {
    std::size_t found = 1;
    while (size != kNone && found < size && at + found < pending_.size() && continues(pending_[at + found])) ++found;
    return found;
  }

  static bool continues(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

  std::string pending_;
};

}  // namespace runner
