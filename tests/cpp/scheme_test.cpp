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
  for (const Scheme* scheme : made::all_schemes()) {
    const bool int4 = scheme->cell == Cell::int4;
    EXPECT_EQ(scheme->name, (int4 ? "int4-g" : "int8-g") + std::to_string(scheme->group));
    EXPECT_EQ(scheme->code_min, int4 ? -8 : -127);
    EXPECT_EQ(scheme->code_max, int4 ? 7 : 127);
  }
}

}  // namespace
}  // namespace moepack
