#include "crc32.h"

#include <gtest/gtest.h>

#include "made.h"

namespace moepack {
namespace {

std::uint32_t crc_bit_by_bit(const std::uint8_t* data, std::size_t bytes) {
  std::uint32_t r = ~0u;
  for (std::size_t i = 0; i < bytes; ++i) {
    r ^= data[i];
    for (int bit = 0; bit < 8; ++bit) r = r & 1 ? r >> 1 ^ 0xedb88320u : r >> 1;
  }
  return ~r;
}

TEST(Crc32, CheckValueOfTheStandard) {
  EXPECT_EQ(crc32(reinterpret_cast<const std::uint8_t*>("123456789"), 9), 0xcbf43926u);
}

TEST(Crc32, NothingIsZero) { EXPECT_EQ(crc32(nullptr, 0), 0u); }

TEST(Crc32, EveryLengthAndAlignmentEqualsTheDefinition) {
  std::vector<std::uint8_t> data(100);
  made::Random random(1);
  for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random.bits());
  for (std::size_t begin = 0; begin < 9; ++begin)
    for (std::size_t bytes = 0; begin + bytes <= data.size(); ++bytes)
      ASSERT_EQ(crc32(data.data() + begin, bytes), crc_bit_by_bit(data.data() + begin, bytes)) << begin << " " << bytes;
}

}  // namespace
}  // namespace moepack
