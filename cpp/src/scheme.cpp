#include "moepack/scheme.h"

#include <iterator>

namespace moepack {
namespace {

constexpr Scheme kSchemes[] = {
    {"int4-g32", Cell::int4, 32, -8, 7},     {"int4-g64", Cell::int4, 64, -8, 7},
    {"int4-g128", Cell::int4, 128, -8, 7},   {"int8-g32", Cell::int8, 32, -127, 127},
    {"int8-g64", Cell::int8, 64, -127, 127}, {"int8-g128", Cell::int8, 128, -127, 127},
};

}  // namespace

const Scheme* schemes_begin() { return std::begin(kSchemes); }
const Scheme* schemes_end() { return std::end(kSchemes); }

const Scheme* find_scheme(std::string_view name) {
  for (const Scheme& scheme : kSchemes)
    if (scheme.name == name) return &scheme;
  return nullptr;
}

const char* scheme_names() { return "int4-g32, int4-g64, int4-g128, int8-g32, int8-g64, int8-g128"; }

}  // namespace moepack
