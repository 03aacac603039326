#include "moepack/scheme.h"

#include <gtest/gtest.h>

#include <string>

#include "made.h"

namespace moepack {
namespace {

TEST(Scheme, EveryRowIsFoundByItsName) {
  for (const Scheme* scheme : made::all_schemes()) EXPECT_EQ(find_scheme(scheme->name), scheme);
}

TEST(Scheme, UnknownNamesAreNotFound) {
  for (const char* name : {"", "int4", "int4-g32 ", "INT4-G32", "int4-g16", "int2-g32", "int4-g320"})
    EXPECT_EQ(find_scheme(name), nullptr) << name;
}

TEST(Scheme, TheListOfNamesIsTheTable) {
  std::string names;
  for (const Scheme* scheme : made::all_schemes()) names += (names.empty() ? "" : ", ") + std::string(scheme->name);
  EXPECT_EQ(names, scheme_names());
}

TEST(Scheme, FieldsAgreeWithTheName) {
  for (const Scheme* scheme : made::integer_schemes()) {
    const bool int4 = scheme->cell == Cell::int4;
    EXPECT_EQ(scheme->name, (int4 ? "int4-g" : "int8-g") + std::to_string(scheme->group));
    EXPECT_EQ(scheme->code_min, int4 ? -8 : -127);
    EXPECT_EQ(scheme->code_max, int4 ? 7 : 127);
  }
}

TEST(Scheme, CellsFillTheirLines) {
  for (const Scheme* scheme : made::all_schemes()) {
    const CellInfo& cell = cell_info(scheme->cell);
    EXPECT_EQ(16 * cell.k * cell.bits, 64 * 8) << scheme->name;
    EXPECT_EQ(scheme->group % cell.k, 0) << scheme->name;
    EXPECT_EQ(scheme->name.substr(0, std::string(cell.name).size()), cell.name);
  }
}

TEST(Scheme, CodesThatABlobMayHold) {
  const auto count = [](const char* name) {
    int codes = 0;
    for (int code = -128; code < 128; ++code) codes += is_code(*find_scheme(name), static_cast<std::int8_t>(code));
    return codes;
  };
  EXPECT_EQ(count("int4-g32"), 16);
  EXPECT_EQ(count("int8-g32"), 256);
  EXPECT_EQ(count("mxfp4"), 16);
  EXPECT_EQ(count("fp8-b128"), 254);  // all but the two NaNs
}

}  // namespace
}  // namespace moepack
