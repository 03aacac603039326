#include "crc32.h"

#include <array>
#include <cstring>

namespace moepack {
namespace {

// table[j][b]: the remainder of byte b followed by j zero bytes; eight of them take eight bytes in one step.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t r = b;
    for (int bit = 0; bit < 8; ++bit) r = r >> 1 ^ (r & 1 ? 0xedb88320u : 0);
    tables[0][b] = r;
  }
  for (std::size_t j = 1; j < 8; ++j)
    for (std::size_t b = 0; b < 256; ++b) tables[j][b] = tables[j - 1][b] >> 8 ^ tables[0][tables[j - 1][b] & 255];
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

std::uint32_t crc32(const std::uint8_t* data, std::size_t bytes) {
  std::uint32_t r = 0xffffffffu;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    std::uint32_t next = 0;
    for (std::size_t j = 0; j < 4; ++j) next ^= kTables[7 - j][(r >> 8 * j & 255) ^ data[j]];
    for (std::size_t j = 4; j < 8; ++j) next ^= kTables[7 - j][data[j]];
    r = next;
  }
  for (; bytes > 0; --bytes) r = r >> 8 ^ kTables[0][(r & 255) ^ *data++];
  return ~r;
}

}  // namespace moepack
