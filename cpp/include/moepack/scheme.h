// Weight schemes: how the numbers of a matrix are coded. One row of a table each.
#pragma once

#include <cstdint>
#include <string_view>

namespace moepack {

// What a panel is made of: the unit that a kernel reads and multiplies.
enum class Cell : std::uint16_t {
  int4 = 1,  // 16 columns x 8 k, unsigned nibbles with zero at 8
  int8 = 2,  // 16 columns x 4 k, signed bytes
};

struct Scheme {
  std::string_view name;  // as in the CLI, the op's attribute, the manifest and config.json
  Cell cell;
  std::int32_t group;     // k per scale
  std::int32_t code_min;  // smallest and largest signed code
  std::int32_t code_max;
};

// The scheme of that name, or nullptr.
const Scheme* find_scheme(std::string_view name);

// All schemes, in the order of the table.
const Scheme* schemes_begin();
const Scheme* schemes_end();

// "int4-g32, int4-g64, ...": for error messages.
const char* scheme_names();

}  // namespace moepack
