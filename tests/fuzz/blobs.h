// Packed blobs with what is wrong with them.
#pragma once

#include <random>
#include <vector>

#include "choices.h"
#include "memory.h"
#include "moepack/packed.h"

namespace moepack::fuzz {

inline const Scheme& scheme(Choices& choices) {
  return schemes_begin()[choices.below(schemes_end() - schemes_begin())];
}

inline std::size_t scale_bytes(const Scheme& scheme) {
  return static_cast<std::size_t>(cell_info(scheme.cell).scale_bytes);
}

// Of about 1 or less, as fp16, fp32 or a power of two, so that damage elsewhere is not lost in infinities.
inline void make_scale(std::uint8_t* scale, std::size_t bytes, std::mt19937& random) {
  for (std::size_t i = 0; i < bytes; ++i) scale[i] = static_cast<std::uint8_t>(random());
  std::uint8_t& last = scale[bytes - 1];
  if (bytes == 1)
    last = static_cast<std::uint8_t>(0x78 + last % 8);
  else
    last = static_cast<std::uint8_t>((last & 0x8f) | (bytes == 2 ? 0x20 : 0x30));
}

// Any codes of the scheme, packed.
inline std::vector<std::uint8_t> valid_blob(const Scheme& scheme, std::int64_t rows, std::int64_t cols, RowOrder order,
                                            std::mt19937& random) {
  std::vector<std::int8_t> codes(static_cast<std::size_t>(rows * cols));
  const auto count = static_cast<unsigned>(scheme.code_max - scheme.code_min + 1);
  for (auto& code : codes) code = static_cast<std::int8_t>(scheme.code_min + static_cast<int>(random() % count));
  const std::size_t bytes = scale_bytes(scheme);
  Memory scales(static_cast<std::size_t>(rows * ceil_div(cols, scheme.group)) * bytes);
  for (std::size_t i = 0; i < scales.size(); i += bytes) make_scale(scales.data() + i, bytes, random);
  std::vector<std::uint8_t> blob(static_cast<std::size_t>(packed_bytes(scheme, rows, cols, order)));
  pack(scheme, order, rows, cols, codes.data(), scales.data(), -3, blob.data());
  return blob;
}

// The same in torchao's layout, of random codes: whole groups, 16 rows at least.
inline std::vector<std::uint8_t> valid_universal_blob(const Scheme& scheme, std::int64_t bytes, std::mt19937& random) {
  std::vector<std::uint8_t> blob(static_cast<std::size_t>(bytes));
  for (auto& byte : blob) byte = static_cast<std::uint8_t>(random());
  const std::int32_t bits = cell_info(scheme.cell).bits;
  const std::int32_t header[] = {6712, 1, bits, 0, 0, 8, 16, 2, 0, 0, 0, 0, 0, 0, 0, 0};
  std::memcpy(blob.data(), header, sizeof header);
  const std::size_t codes = static_cast<std::size_t>(8 * scheme.group * bits / 8);
  for (std::size_t scales = sizeof header + codes; scales < blob.size(); scales += codes + 64)
    for (std::size_t i = 3; i < 32; i += 4)
      blob[scales + i] = static_cast<std::uint8_t>((blob[scales + i] & 0x80) | 0x3c);
  return blob;
}

// A field of the header set to something, or a byte of it.
inline void damage_header(Choices& choices, std::uint8_t* blob) {
  struct Field {
    std::size_t offset, bytes;
  };
  constexpr Field fields[] = {{0, 4},  {4, 2},  {6, 2},  {8, 4},  {12, 4}, {16, 4},
                              {20, 4}, {24, 4}, {28, 2}, {30, 2}, {32, 8}, {56, 8}};
  const Field field = fields[choices.below(std::size(fields))];
  const std::int64_t value = choices.integer();
  if (choices.one_in(3))
    blob[choices.below(sizeof(PackedHeader))] ^= static_cast<std::uint8_t>(1 + choices.below(255));
  else
    std::memcpy(blob + field.offset, &value, field.bytes);
}

inline void damage_payload(Choices& choices, std::uint8_t* blob, std::int64_t bytes) {
  std::mt19937 random = choices.stream();
  const std::int64_t first = static_cast<std::int64_t>(sizeof(PackedHeader)), count = bytes - first;
  if (count <= 0) return;
  if (choices.one_in(2)) {
    for (std::int64_t i = first; i < bytes; ++i) blob[i] = static_cast<std::uint8_t>(random());
    return;
  }
  for (std::int64_t left = 1 + choices.below(8); left > 0; --left)
    blob[first + random() % count] = static_cast<std::uint8_t>(random());
}

}  // namespace moepack::fuzz
