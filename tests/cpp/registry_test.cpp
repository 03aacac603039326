#include "gemm/registry.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "made.h"
#include "moepack/isa.h"

namespace moepack {
namespace {

using made::contains;

std::string active() {
  const char* name = nullptr;
  const Status status = active_isa(name);
  return status.ok() ? name : status.message();
}

std::string listed() {
  std::string names;
  for (const std::string& name : made::supported_isas()) names += (names.empty() ? "" : ", ") + name;
  return names;
}

std::string best_by_default() {
  for (int i = 0; i < isa_count(); ++i)
    if (isa_info(i).supported && isa_info(i).chosen_by_default) return isa_info(i).name;
  return "";
}

TEST(Registry, ScalarIsLastAndRunsEverywhere) {
  ASSERT_GE(isa_count(), 1);
  const IsaInfo last = isa_info(isa_count() - 1);
  EXPECT_STREQ(last.name, "scalar");
  EXPECT_TRUE(last.supported);
  EXPECT_TRUE(last.chosen_by_default);
}

TEST(Registry, NamesAreUniqueAndKernelsCarryThem) {
  std::set<std::string> names;
  for (int i = 0; i < isa_count(); ++i) EXPECT_TRUE(names.insert(isa_info(i).name).second);
  for (const std::string& name : made::supported_isas()) EXPECT_EQ(made::kernel_of(name).name, name);
}

TEST(Registry, ForcingGoesThereAndBack) {
  for (const std::string& name : made::supported_isas()) {
    const made::ForcedIsa forced(name);
    EXPECT_EQ(active(), name);
  }
}

TEST(Registry, ForcingAnUnknownNameIsAnErrorAndChangesNothing) {
  for (const char* name : {"sse2", "", "AVX2", "avx2 ", "scalar,avx2"}) {
    const made::ForcedIsa forced("scalar");
    const Status status = force_isa(name);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(status.message(), "isa=" + std::string(name) + ": no such instruction set; this CPU runs " + listed());
    EXPECT_EQ(active(), "scalar");
  }
}

TEST(Registry, ForcingWhatTheCpuLacksIsAnError) {
  for (int i = 0; i < isa_count(); ++i) {
    if (isa_info(i).supported) continue;
    const Status status = force_isa(isa_info(i).name);
    EXPECT_TRUE(contains(status.message(), "this CPU does not support it; this CPU runs " + listed()));
  }
}

// The variable is read once in a process: each of these runs in one of its own.
class Variable : public testing::Test {
 protected:
  Variable() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }

  [[noreturn]] static void print_active(const char* variable) {
    if (variable) setenv("MOEPACK_ISA", variable, 1);
    if (!variable) unsetenv("MOEPACK_ISA");
    std::fprintf(stderr, "active: %s.", active().c_str());
    std::exit(0);
  }
};

using VariableDeathTest = Variable;

TEST_F(VariableDeathTest, WithoutItTheBestIsChosen) {
  EXPECT_EXIT(print_active(nullptr), testing::ExitedWithCode(0), "active: " + best_by_default() + "\\.");
  EXPECT_EXIT(print_active(""), testing::ExitedWithCode(0), "active: " + best_by_default() + "\\.");
}

TEST_F(VariableDeathTest, ANameIsObeyed) {
  for (const std::string& name : made::supported_isas())
    EXPECT_EXIT(print_active(name.c_str()), testing::ExitedWithCode(0), "active: " + name + "\\.");
}

TEST_F(VariableDeathTest, AnUnknownNameIsAnErrorThatListsWhatRuns) {
  EXPECT_EXIT(print_active("mmx"), testing::ExitedWithCode(0),
              "active: MOEPACK_ISA=mmx: no such instruction set; this CPU runs " + listed());
}

[[noreturn]] void call_the_ops_with_a_bad_name(std::int64_t tokens) {
  setenv("MOEPACK_ISA", "mmx", 1);
  const made::Layer layer = made::layer(*find_scheme("int4-g32"), 16, 16, 2);
  made::Values out = made::values(std::vector<float>(static_cast<std::size_t>(16 * tokens)), DType::f32);
  const Status status = made::run_experts(layer, out, made::routing(tokens, 1, 2), 1, out);
  std::fprintf(stderr, "experts: %s.", status.message());
  std::exit(0);
}

TEST_F(VariableDeathTest, EveryCallOfTheOpsReturnsTheError) {
  EXPECT_EXIT(call_the_ops_with_a_bad_name(1), testing::ExitedWithCode(0), "experts: MOEPACK_ISA=mmx: no such");
  EXPECT_EXIT(call_the_ops_with_a_bad_name(0), testing::ExitedWithCode(0), "experts: MOEPACK_ISA=mmx: no such");
}

}  // namespace
}  // namespace moepack
