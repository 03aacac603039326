#include "moepack/status.h"

#include <gtest/gtest.h>

#include <string>

namespace moepack {
namespace {

TEST(Status, IsOkAndEmptyByDefault) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_STREQ(status.message(), "");
}

TEST(Status, AnErrorSaysWhatIsWrong) {
  const Status status = Status::error("%d of %s", 3, "four");
  EXPECT_FALSE(status.ok());
  EXPECT_STREQ(status.message(), "3 of four");
}

TEST(Status, ALongMessageIsCutNotOverrun) {
  const std::string text(5000, 'x');
  const Status status = Status::error("%s", text.c_str());
  EXPECT_EQ(std::string(status.message()), text.substr(0, 319));
}

TEST(Status, CopiesKeepTheMessage) {
  Status copy;
  copy = Status::error("first");
  const Status again = copy;
  EXPECT_FALSE(again.ok());
  EXPECT_STREQ(again.message(), "first");
}

}  // namespace
}  // namespace moepack
