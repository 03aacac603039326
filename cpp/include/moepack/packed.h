// The packed format, version 1. docs/reference/packed-format.md is its specification.
//
// One blob holds one matrix [N, K] of one expert: a 64-byte header, then panels of 16 columns (rows of the
// mathematical matrix: a column is one output). A panel holds, for every group along K, the group's cells followed by
// its 16 scales. K is padded with zero weights to whole groups, N to whole panels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moepack/scheme.h"
#include "moepack/status.h"

namespace moepack {

constexpr int kPanelColumns = 16;
constexpr int kCellBytes = 64;
constexpr std::uint16_t kFormatVersion = 1;
constexpr std::uint32_t kMagic = 0x50454f4d;  // "MOEP" in memory

// How logical rows map to panels.
enum class RowOrder : std::uint16_t {
  plain = 0,
  gate_up = 1,  // rows [gate; up]: panel 2i is gate rows 16i.., panel 2i+1 up rows 16i..
};

struct PackedHeader {  // little-endian
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t cell;
  std::uint32_t rows;  // N; gate and up together under RowOrder::gate_up
  std::uint32_t cols;  // K
  std::uint32_t group;
  std::int32_t scale_exponent;  // weight = value of the code * scale * 2^scale_exponent
  std::uint32_t payload_crc32;  // IEEE 802.3, of all bytes after the header
  std::uint16_t row_order;
  std::uint16_t reserved16;
  std::uint8_t reserved[32];  // zero
};
static_assert(sizeof(PackedHeader) == 64);
static_assert(offsetof(PackedHeader, scale_exponent) == 20);
static_assert(offsetof(PackedHeader, row_order) == 28);

// Bytes of k-th dimension pieces.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

struct ExponentRange {
  std::int32_t min, max;
};
ExponentRange exponent_range(Cell cell);

std::int64_t group_bytes(const Scheme& scheme);  // cells + 16 scales
std::int64_t panel_bytes(const Scheme& scheme, std::int64_t cols);
std::int64_t panel_count(std::int64_t rows, RowOrder order);
std::int64_t packed_bytes(const Scheme& scheme, std::int64_t rows, std::int64_t cols, RowOrder order);

// Reads and checks a header against what the caller expects. `bytes` is the whole blob's length.
Status check_header(const std::uint8_t* blob, std::int64_t bytes, const Scheme& scheme, std::int64_t rows,
                    std::int64_t cols, RowOrder order);
// The same without expectations: is this a blob that this version reads, and is its length right?
Status read_header(const std::uint8_t* blob, std::int64_t bytes, PackedHeader& header);
// read_header, then the checksum of the payload.
Status verify(const std::uint8_t* blob, std::int64_t bytes);

// Is each of them one, as is_code says of a single number?
bool are_codes(const Scheme& scheme, const std::int8_t* codes, std::int64_t count);

// codes [rows, cols] int8, scales [rows, ceil(cols/group)] in the cell's type -> blob of packed_bytes(...) bytes.
void pack(const Scheme& scheme, RowOrder order, std::int64_t rows, std::int64_t cols, const std::int8_t* codes,
          const void* scales, std::int32_t scale_exponent, std::uint8_t* blob);
// The inverse; the blob has passed read_header.
void unpack(const std::uint8_t* blob, std::int8_t* codes, void* scales);

}  // namespace moepack
