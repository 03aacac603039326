#include "moepack/packed.h"

#include <algorithm>
#include <cstring>

#include "crc32.h"

namespace moepack {
namespace {

int cell_k(Cell cell) { return cell == Cell::int4 ? 8 : 4; }

const char* cell_name(Cell cell) { return cell == Cell::int4 ? "int4" : "int8"; }

const Scheme* scheme_of(const PackedHeader& header) {
  for (const Scheme* scheme = schemes_begin(); scheme != schemes_end(); ++scheme)
    if (static_cast<std::uint16_t>(scheme->cell) == header.cell &&
        static_cast<std::uint32_t>(scheme->group) == header.group)
      return scheme;
  return nullptr;
}

// Where the rows of a panel come from: first row, and how many of its 16 exist.
struct PanelRows {
  std::int64_t first;
  std::int64_t count;
};

PanelRows panel_rows(std::int64_t panel, std::int64_t rows, RowOrder order) {
  const std::int64_t half = rows / 2;
  const std::int64_t within = order == RowOrder::gate_up ? panel / 2 * kPanelColumns : panel * kPanelColumns;
  const std::int64_t limit = order == RowOrder::gate_up ? half : rows;
  const std::int64_t base = order == RowOrder::gate_up && panel % 2 ? half : 0;
  const std::int64_t left = limit - within;
  return {base + within, left < kPanelColumns ? left : kPanelColumns};
}

// Four bytes at once: the word of a column in a cell, from and to signed codes. Works per byte, so on any endianness.
std::uint32_t load_word(const std::int8_t* codes) {
  std::uint32_t word;
  std::memcpy(&word, codes, sizeof word);
  return word;
}

std::uint32_t nibbles_from_codes(std::uint32_t low, std::uint32_t high) {
  const auto plus_8 = [](std::uint32_t codes) { return (codes ^ 0x08080808u) & 0x0f0f0f0fu; };
  return plus_8(low) | plus_8(high) << 4;
}

std::uint32_t codes_from_nibbles(std::uint32_t nibbles) {
  return ((nibbles & 0x0f0f0f0fu) + 0x78787878u) ^ 0x80808080u;  // 0..15 -> -8..7
}

constexpr int kMaxGroup = 128;

// One group of a panel as signed codes, padded with zeros.
struct PanelGroup {
  std::int8_t codes[kPanelColumns][kMaxGroup];
};

void write_cells(const Scheme& scheme, const PanelGroup& group, std::uint8_t* out) {
  const bool nibbles = scheme.cell == Cell::int4;
  const int step = cell_k(scheme.cell);
  for (int k = 0; k < scheme.group; k += step)
    for (int c = 0; c < kPanelColumns; ++c, out += 4) {
      const std::int8_t* codes = group.codes[c] + k;
      const std::uint32_t word =
          nibbles ? nibbles_from_codes(load_word(codes), load_word(codes + 4)) : load_word(codes);
      std::memcpy(out, &word, sizeof word);
    }
}

void read_cells(const Scheme& scheme, const std::uint8_t* in, PanelGroup& group) {
  const bool nibbles = scheme.cell == Cell::int4;
  const int step = cell_k(scheme.cell);
  for (int k = 0; k < scheme.group; k += step)
    for (int c = 0; c < kPanelColumns; ++c, in += 4) {
      std::uint32_t word;
      std::memcpy(&word, in, sizeof word);
      const std::uint32_t low = nibbles ? codes_from_nibbles(word) : word;
      std::memcpy(group.codes[c] + k, &low, sizeof low);
      if (!nibbles) continue;
      const std::uint32_t high = codes_from_nibbles(word >> 4);
      std::memcpy(group.codes[c] + k + 4, &high, sizeof high);
    }
}

void pack_panel(const Scheme& scheme, PanelRows panel, std::int64_t cols, const std::int8_t* codes,
                const std::uint16_t* scales, std::uint8_t* out) {
  const std::int64_t groups = ceil_div(cols, scheme.group);
  for (std::int64_t g = 0; g < groups; ++g, out += group_bytes(scheme)) {
    PanelGroup group{};
    std::uint16_t group_scales[kPanelColumns] = {};
    const std::int64_t k = g * scheme.group, length = std::min<std::int64_t>(scheme.group, cols - k);
    for (std::int64_t c = 0; c < panel.count; ++c) {
      std::memcpy(group.codes[c], codes + (panel.first + c) * cols + k, static_cast<std::size_t>(length));
      group_scales[c] = scales[(panel.first + c) * groups + g];
    }
    write_cells(scheme, group, out);
    std::memcpy(out + group_bytes(scheme) - sizeof group_scales, group_scales, sizeof group_scales);
  }
}

void unpack_panel(const Scheme& scheme, PanelRows panel, std::int64_t cols, const std::uint8_t* in, std::int8_t* codes,
                  std::uint16_t* scales) {
  const std::int64_t groups = ceil_div(cols, scheme.group);
  for (std::int64_t g = 0; g < groups; ++g, in += group_bytes(scheme)) {
    PanelGroup group;
    std::uint16_t group_scales[kPanelColumns];
    read_cells(scheme, in, group);
    std::memcpy(group_scales, in + group_bytes(scheme) - sizeof group_scales, sizeof group_scales);
    const std::int64_t k = g * scheme.group, length = std::min<std::int64_t>(scheme.group, cols - k);
    for (std::int64_t c = 0; c < panel.count; ++c) {
      std::memcpy(codes + (panel.first + c) * cols + k, group.codes[c], static_cast<std::size_t>(length));
      scales[(panel.first + c) * groups + g] = group_scales[c];
    }
  }
}

Status check_fields(const PackedHeader& header, std::int64_t bytes) {
  if (header.magic != kMagic) return Status::error("not a moepack blob: it does not begin with MOEP");
  if (header.version != kFormatVersion)
    return Status::error("packed format version %u; this moepack reads version %u: update moepack or pack again",
                         header.version, kFormatVersion);
  if (!scheme_of(header))
    return Status::error("cell %u with group %u is no known scheme; supported: %s", header.cell, header.group,
                         scheme_names());
  const auto* reserved = reinterpret_cast<const std::uint8_t*>(&header) + offsetof(PackedHeader, reserved16);
  if (std::any_of(reserved, reserved + sizeof header - offsetof(PackedHeader, reserved16),
                  [](auto b) { return b != 0; }))
    return Status::error("the header's last %d bytes are not zero: the data is damaged",
                         static_cast<int>(sizeof header - offsetof(PackedHeader, reserved16)));
  if (header.row_order > 1) return Status::error("row order %u; supported: 0 (plain), 1 (gate_up)", header.row_order);
  if (header.scale_exponent < -126 || header.scale_exponent > 127)
    return Status::error("scale exponent %d is outside -126..127", header.scale_exponent);
  const RowOrder order = static_cast<RowOrder>(header.row_order);
  if (order == RowOrder::gate_up && header.rows % 2)
    return Status::error("row order gate_up needs an even number of rows, not %u", header.rows);
  if (header.rows == 0 || header.cols == 0 || header.rows > INT32_MAX || header.cols > INT32_MAX)
    return Status::error("a matrix of %u x %u is outside 1..2^31-1", header.rows, header.cols);
  const std::int64_t expected = packed_bytes(*scheme_of(header), header.rows, header.cols, order);
  if (bytes != expected)
    return Status::error("the blob has %lld bytes; its header (%u x %u, %s, group %u) makes %lld",
                         static_cast<long long>(bytes), header.rows, header.cols,
                         cell_name(static_cast<Cell>(header.cell)), header.group, static_cast<long long>(expected));
  return {};
}

}  // namespace

std::int64_t group_bytes(const Scheme& scheme) {
  return scheme.group / cell_k(scheme.cell) * kCellBytes + 2 * kPanelColumns;
}

std::int64_t panel_bytes(const Scheme& scheme, std::int64_t cols) {
  return ceil_div(cols, scheme.group) * group_bytes(scheme);
}

std::int64_t panel_count(std::int64_t rows, RowOrder order) {
  return order == RowOrder::gate_up ? 2 * ceil_div(rows / 2, kPanelColumns) : ceil_div(rows, kPanelColumns);
}

std::int64_t packed_bytes(const Scheme& scheme, std::int64_t rows, std::int64_t cols, RowOrder order) {
  return static_cast<std::int64_t>(sizeof(PackedHeader)) + panel_count(rows, order) * panel_bytes(scheme, cols);
}

Status read_header(const std::uint8_t* blob, std::int64_t bytes, PackedHeader& header) {
  if (bytes < static_cast<std::int64_t>(sizeof header))
    return Status::error("%lld bytes are too few for a packed matrix: its header alone has 64",
                         static_cast<long long>(bytes));
  std::memcpy(&header, blob, sizeof header);
  return check_fields(header, bytes);
}

Status check_header(const std::uint8_t* blob, std::int64_t bytes, const Scheme& scheme, std::int64_t rows,
                    std::int64_t cols, RowOrder order) {
  PackedHeader header{};
  if (Status status = read_header(blob, bytes, header); !status.ok()) return status;
  if (header.cell != static_cast<std::uint16_t>(scheme.cell) ||
      header.group != static_cast<std::uint32_t>(scheme.group) || header.rows != static_cast<std::uint64_t>(rows) ||
      header.cols != static_cast<std::uint64_t>(cols) || header.row_order != static_cast<std::uint16_t>(order))
    return Status::error(
        "the blob holds %u x %u, %s, group %u, row order %u; the call needs %lld x %lld, %s, group %d, "
        "row order %u",
        header.rows, header.cols, cell_name(static_cast<Cell>(header.cell)), header.group, header.row_order,
        static_cast<long long>(rows), static_cast<long long>(cols), cell_name(scheme.cell), scheme.group,
        static_cast<unsigned>(order));
  return {};
}

Status verify(const std::uint8_t* blob, std::int64_t bytes) {
  PackedHeader header{};
  if (Status status = read_header(blob, bytes, header); !status.ok()) return status;
  const std::uint32_t crc = crc32(blob + sizeof header, static_cast<std::size_t>(bytes) - sizeof header);
  if (crc != header.payload_crc32)
    return Status::error("the payload's checksum is %08x, the header says %08x: the data is damaged", crc,
                         header.payload_crc32);
  return {};
}

void pack(const Scheme& scheme, RowOrder order, std::int64_t rows, std::int64_t cols, const std::int8_t* codes,
          const std::uint16_t* scales, std::int32_t scale_exponent, std::uint8_t* blob) {
  std::uint8_t* out = blob + sizeof(PackedHeader);
  for (std::int64_t p = 0; p < panel_count(rows, order); ++p, out += panel_bytes(scheme, cols))
    pack_panel(scheme, panel_rows(p, rows, order), cols, codes, scales, out);

  PackedHeader header{};
  header.magic = kMagic;
  header.version = kFormatVersion;
  header.cell = static_cast<std::uint16_t>(scheme.cell);
  header.rows = static_cast<std::uint32_t>(rows);
  header.cols = static_cast<std::uint32_t>(cols);
  header.group = static_cast<std::uint32_t>(scheme.group);
  header.scale_exponent = scale_exponent;
  header.row_order = static_cast<std::uint16_t>(order);
  header.payload_crc32 = crc32(blob + sizeof header, static_cast<std::size_t>(out - blob) - sizeof header);
  std::memcpy(blob, &header, sizeof header);
}

void unpack(const std::uint8_t* blob, std::int8_t* codes, std::uint16_t* scales) {
  PackedHeader header{};
  std::memcpy(&header, blob, sizeof header);
  const Scheme& scheme = *scheme_of(header);
  const RowOrder order = static_cast<RowOrder>(header.row_order);
  const std::uint8_t* in = blob + sizeof header;
  for (std::int64_t p = 0; p < panel_count(header.rows, order); ++p, in += panel_bytes(scheme, header.cols))
    unpack_panel(scheme, panel_rows(p, header.rows, order), header.cols, in, codes, scales);
}

}  // namespace moepack
