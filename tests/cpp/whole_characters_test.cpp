#include "../../cpp/runner/whole_characters.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace {

std::string streamed(const std::vector<std::string>& pieces) {
  runner::WholeCharacters characters;
  std::string text;
  for (const std::string& piece : pieces) text += characters.add(piece);
  return text + characters.end();
}

constexpr char kReplacement[] = "\xEF\xBF\xBD";
// a, e with acute, euro, grinning face: one to four bytes.
const std::string kText = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";

TEST(WholeCharacters, AreTheSameTextHoweverItIsCut) {
  for (std::size_t first = 0; first <= kText.size(); ++first)
    for (std::size_t second = first; second <= kText.size(); ++second)
      EXPECT_EQ(streamed({kText.substr(0, first), kText.substr(first, second - first), kText.substr(second)}), kText);
}

TEST(WholeCharacters, WaitForTheirLastByte) {
  runner::WholeCharacters characters;
  EXPECT_EQ(characters.add("a\xF0"), "a");
  EXPECT_EQ(characters.add("\x9F"), "");
  EXPECT_EQ(characters.add("\x98"), "");
  EXPECT_EQ(characters.add("\x80z"), "\xF0\x9F\x98\x80z");
  EXPECT_EQ(characters.end(), "");
}

TEST(WholeCharacters, ReplaceWhatIsNoUtf8) {
  EXPECT_EQ(streamed({"a\x80z"}), std::string("a") + kReplacement + "z");
  EXPECT_EQ(streamed({"\xE2", "z"}), std::string(kReplacement) + "z");
  EXPECT_EQ(streamed({"\xE2\x82", "\xC3\xA9"}), std::string(kReplacement) + "\xC3\xA9");
  EXPECT_EQ(streamed({"\xFF\xC0"}), std::string(kReplacement) + kReplacement);
  EXPECT_EQ(streamed({"a\xF0\x9F"}), std::string("a") + kReplacement);
}

}  // namespace
