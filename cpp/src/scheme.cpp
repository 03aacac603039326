#include "moepack/scheme.h"

#include <iterator>

namespace moepack {
namespace {

constexpr Scheme kSchemes[] = {
    {"int4-g32", Cell::int4, 32, -8, 7},     {"int4-g64", Cell::int4, 64, -8, 7},
    {"int4-g128", Cell::int4, 128, -8, 7},   {"int8-g32", Cell::int8, 32, -127, 127},
    {"int8-g64", Cell::int8, 64, -127, 127}, {"int8-g128", Cell::int8, 128, -127, 127},
    {"mxfp4", Cell::mxfp4, 32, 0, 15},       {"fp8-b128", Cell::fp8, 128, -128, 127},
};

constexpr CellInfo kCells[] = {
    {"int4", 4, 8, ScaleType::fp16, 2},
    {"int8", 8, 4, ScaleType::fp16, 2},
    {"mxfp4", 4, 8, ScaleType::e8m0, 1},
    {"fp8", 8, 4, ScaleType::fp32, 4},
};

}  // namespace

const Scheme* schemes_begin() { return std::begin(kSchemes); }
const Scheme* schemes_end() { return std::end(kSchemes); }

bool is_code(const Scheme& scheme, std::int8_t code) {
  if (scheme.cell == Cell::int8) return true;
  if (scheme.cell == Cell::fp8) return (code & 0x7f) != 0x7f;
  return code >= scheme.code_min && code <= scheme.code_max;
}

const Scheme* find_scheme(std::string_view name) {
  for (const Scheme& scheme : kSchemes)
    if (scheme.name == name) return &scheme;
  return nullptr;
}

const Scheme* find_scheme(std::uint32_t cell, std::uint32_t group) {
  for (const Scheme& scheme : kSchemes)
    if (static_cast<std::uint32_t>(scheme.cell) == cell && static_cast<std::uint32_t>(scheme.group) == group)
      return &scheme;
  return nullptr;
}

const char* scheme_names() { return "int4-g32, int4-g64, int4-g128, int8-g32, int8-g64, int8-g128, mxfp4, fp8-b128"; }

const CellInfo& cell_info(Cell cell) { return kCells[static_cast<int>(cell) - 1]; }

}  // namespace moepack
