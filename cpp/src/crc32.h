#pragma once

#include <cstddef>
#include <cstdint>

namespace moepack {

// CRC-32 of IEEE 802.3 (polynomial 0xedb88320 reflected, initial value and final xor all ones), as zlib's crc32.
std::uint32_t crc32(const std::uint8_t* data, std::size_t bytes);

}  // namespace moepack
