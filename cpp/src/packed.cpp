#include "moepack/packed.h"

#include <algorithm>
#include <cstring>

#include "crc32.h"

namespace moepack {
namespace {

const char* cell_name(std::uint16_t cell) { return cell_info(static_cast<Cell>(cell)).name; }

const Scheme* scheme_of(const PackedHeader& header) { return find_scheme(header.cell, header.group); }

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

// Nibbles of int4 cells have their zero at 8, those of mxfp4 are codes as they are.
void write_nibbles(Cell cell, const std::int8_t* codes, std::uint8_t* out) {
  const std::uint32_t low = load_word(codes), high = load_word(codes + 4);
  const std::uint32_t word = cell == Cell::int4 ? nibbles_from_codes(low, high) : low | high << 4;
  std::memcpy(out, &word, sizeof word);
}

void read_nibbles(Cell cell, const std::uint8_t* in, std::int8_t* codes) {
  std::uint32_t word;
  std::memcpy(&word, in, sizeof word);
  const auto decoded = [cell](std::uint32_t nibbles) {
    return cell == Cell::int4 ? codes_from_nibbles(nibbles) : nibbles & 0x0f0f0f0fu;
  };
  const std::uint32_t halves[] = {decoded(word), decoded(word >> 4)};
  std::memcpy(codes, halves, sizeof halves);
}

// Visits the codes of a group, in the order of its bytes: column, k and place in the cells of what stands together.
template <class Visit>
void for_each_code_word(const Scheme& scheme, Visit visit) {
  const int step = cell_info(scheme.cell).k;
  for (int k = 0; k < scheme.group; k += step)
    for (int c = 0; c < kPanelColumns; ++c) visit(c, k, k / step * kCellBytes + 4 * c);
}

void write_cells(const Scheme& scheme, const PanelGroup& group, std::uint8_t* out) {
  for_each_code_word(scheme, [&](int c, int k, int at) {
    const std::int8_t* codes = group.codes[c] + k;
    if (scheme.cell == Cell::int8) return static_cast<void>(std::memcpy(out + at, codes, 4));
    if (scheme.cell != Cell::fp8) return write_nibbles(scheme.cell, codes, out + at);
    for (int j = 0; j < 4; ++j) out[(k + j) * kPanelColumns + c] = static_cast<std::uint8_t>(codes[j]);
  });
}

void read_cells(const Scheme& scheme, const std::uint8_t* in, PanelGroup& group) {
  for_each_code_word(scheme, [&](int c, int k, int at) {
    std::int8_t* codes = group.codes[c] + k;
    if (scheme.cell == Cell::int8) return static_cast<void>(std::memcpy(codes, in + at, 4));
    if (scheme.cell != Cell::fp8) return read_nibbles(scheme.cell, in + at, codes);
    for (int j = 0; j < 4; ++j) codes[j] = static_cast<std::int8_t>(in[(k + j) * kPanelColumns + c]);
  });
}

void pack_panel(const Scheme& scheme, PanelRows panel, std::int64_t cols, const std::int8_t* codes,
                const std::uint8_t* scales, std::uint8_t* out) {
  const std::int64_t groups = ceil_div(cols, scheme.group), scale_bytes = cell_info(scheme.cell).scale_bytes;
  PanelGroup group{};  // columns that no row fills stay zero
  for (std::int64_t g = 0; g < groups; ++g, out += group_bytes(scheme)) {
    const std::int64_t k = g * scheme.group, length = std::min<std::int64_t>(scheme.group, cols - k);
    if (length < scheme.group) group = {};
    std::uint8_t* group_scales = out + group_bytes(scheme) - kPanelColumns * scale_bytes;
    std::memset(group_scales, 0, static_cast<std::size_t>(kPanelColumns * scale_bytes));
    for (std::int64_t c = 0; c < panel.count; ++c) {
      std::memcpy(group.codes[c], codes + (panel.first + c) * cols + k, static_cast<std::size_t>(length));
      std::memcpy(group_scales + c * scale_bytes, scales + ((panel.first + c) * groups + g) * scale_bytes,
                  static_cast<std::size_t>(scale_bytes));
    }
    write_cells(scheme, group, out);
  }
}

void unpack_panel(const Scheme& scheme, PanelRows panel, std::int64_t cols, const std::uint8_t* in, std::int8_t* codes,
                  std::uint8_t* scales) {
  const std::int64_t groups = ceil_div(cols, scheme.group), scale_bytes = cell_info(scheme.cell).scale_bytes;
  for (std::int64_t g = 0; g < groups; ++g, in += group_bytes(scheme)) {
    PanelGroup group;
    read_cells(scheme, in, group);
    const std::int64_t k = g * scheme.group, length = std::min<std::int64_t>(scheme.group, cols - k);
    const std::uint8_t* group_scales = in + group_bytes(scheme) - kPanelColumns * scale_bytes;
    for (std::int64_t c = 0; c < panel.count; ++c) {
      std::memcpy(codes + (panel.first + c) * cols + k, group.codes[c], static_cast<std::size_t>(length));
      std::memcpy(scales + ((panel.first + c) * groups + g) * scale_bytes, group_scales + c * scale_bytes,
                  static_cast<std::size_t>(scale_bytes));
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
  const ExponentRange range = exponent_range(static_cast<Cell>(header.cell));
  if (header.scale_exponent < range.min || header.scale_exponent > range.max)
    return Status::error("scale exponent %d is outside %d..%d", header.scale_exponent, range.min, range.max);
  const RowOrder order = static_cast<RowOrder>(header.row_order);
  if (order == RowOrder::gate_up && header.rows % 2)
    return Status::error("row order gate_up needs an even number of rows, not %u", header.rows);
  if (header.rows == 0 || header.cols == 0 || header.rows > INT32_MAX || header.cols > INT32_MAX)
    return Status::error("a matrix of %u x %u is outside 1..2^31-1", header.rows, header.cols);
  const std::int64_t expected = packed_bytes(*scheme_of(header), header.rows, header.cols, order);
  if (bytes != expected)
    return Status::error("the blob has %lld bytes; its header (%u x %u, %s, group %u) makes %lld",
                         static_cast<long long>(bytes), header.rows, header.cols, cell_name(header.cell), header.group,
                         static_cast<long long>(expected));
  return {};
}

}  // namespace

ExponentRange exponent_range(Cell cell) {
  // The scales of the others span what fp32 does by themselves.
  return cell_info(cell).scale == ScaleType::fp16 ? ExponentRange{-126, 127} : ExponentRange{-64, 64};
}

std::int64_t group_bytes(const Scheme& scheme) {
  const CellInfo& cell = cell_info(scheme.cell);
  return scheme.group / cell.k * kCellBytes + cell.scale_bytes * kPanelColumns;
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

bool are_codes(const Scheme& scheme, const std::int8_t* codes, std::int64_t count) {
  if (scheme.cell == Cell::int8) return true;
  std::uint8_t bad = 0;
  if (scheme.cell == Cell::fp8) {
    for (std::int64_t i = 0; i < count; ++i) bad |= (codes[i] & 0x7f) == 0x7f;
  } else {
    const auto min = static_cast<std::int8_t>(scheme.code_min), max = static_cast<std::int8_t>(scheme.code_max);
    for (std::int64_t i = 0; i < count; ++i) bad |= (codes[i] < min) | (codes[i] > max);
  }
  return bad == 0;
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
        header.rows, header.cols, cell_name(header.cell), header.group, header.row_order, static_cast<long long>(rows),
        static_cast<long long>(cols), cell_info(scheme.cell).name, scheme.group, static_cast<unsigned>(order));
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
          const void* scales, std::int32_t scale_exponent, std::uint8_t* blob) {
  std::uint8_t* out = blob + sizeof(PackedHeader);
  for (std::int64_t p = 0; p < panel_count(rows, order); ++p, out += panel_bytes(scheme, cols))
    pack_panel(scheme, panel_rows(p, rows, order), cols, codes, static_cast<const std::uint8_t*>(scales), out);

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

void unpack(const std::uint8_t* blob, std::int8_t* codes, void* scales) {
  PackedHeader header{};
  std::memcpy(&header, blob, sizeof header);
  const Scheme& scheme = *scheme_of(header);
  const RowOrder order = static_cast<RowOrder>(header.row_order);
  const std::uint8_t* in = blob + sizeof header;
  for (std::int64_t p = 0; p < panel_count(header.rows, order); ++p, in += panel_bytes(scheme, header.cols))
    unpack_panel(scheme, panel_rows(p, header.rows, order), header.cols, in, codes, static_cast<std::uint8_t*>(scales));
}

}  // namespace moepack
