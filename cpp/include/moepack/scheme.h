// Weight schemes: how the numbers of a matrix are coded. One row of a table each.
#pragma once

#include <cstdint>
#include <string_view>

namespace moepack {

// What a panel is made of: the unit that a kernel reads and multiplies.
enum class Cell : std::uint16_t {
  int4 = 1,   // 16 columns x 8 k, unsigned nibbles with zero at 8
  int8 = 2,   // 16 columns x 4 k, signed bytes
  mxfp4 = 3,  // 16 columns x 8 k, nibbles: e2m1
  fp8 = 4,    // 4 k x 16 columns, bytes: e4m3
};

// How the 16 scales behind a group's cells are stored.
enum class ScaleType { fp16, e8m0, fp32 };

struct CellInfo {
  const char* name;
  int bits;  // of a code
  int k;     // of the 16 columns that 64 bytes hold
  ScaleType scale;
  int scale_bytes;
};
const CellInfo& cell_info(Cell cell);

struct Scheme {
  std::string_view name;  // as in the CLI, the op's attribute, the manifest and config.json
  Cell cell;
  std::int32_t group;     // k per scale
  std::int32_t code_min;  // smallest and largest code; those of floating-point cells are bit patterns
  std::int32_t code_max;
};

// Whether a blob may hold it. int8 cells hold any int8: torchao's codes begin at -128, moepack's own at -127. NaNs of
// e4m3 are none.
bool is_code(const Scheme& scheme, std::int8_t code);

// The scheme of that name, or nullptr.
const Scheme* find_scheme(std::string_view name);
// The scheme of these cells and this group, as a header has them, or nullptr.
const Scheme* find_scheme(std::uint32_t cell, std::uint32_t group);

// All schemes, in the order of the table.
const Scheme* schemes_begin();
const Scheme* schemes_end();

// "int4-g32, int4-g64, ...": for error messages.
const char* scheme_names();

}  // namespace moepack
