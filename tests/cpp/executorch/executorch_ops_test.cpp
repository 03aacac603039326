// The ExecuTorch kernels, called as the runtime calls them: with a list of values that a program file made up.
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "arguments.h"

namespace moepack {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using made::Arguments;

// A call of quantized_experts.out with arguments that can be replaced one by one.
class Call : public Arguments {
 public:
  Call() : layer_(made::layer(*find_scheme("int4-g32"), 40, 24, kE)), routing_(made::routing(kT, kK, kE)) {
    x_ = made::Random(3).floats(kT * 40);
    out_.assign(x_.size(), 7.0f);
    add(x_.data(), {kT, 40}, ScalarType::Float);
    add(routing_.ids.data(), {kT, kK}, ScalarType::Long);
    add(routing_.weights.data(), {kT, kK}, ScalarType::Float);
    add(layer_.w13.data(), {kE, static_cast<SizesType>(layer_.bytes13)}, ScalarType::Byte);
    add(layer_.w2.data(), {kE, static_cast<SizesType>(layer_.bytes2)}, ScalarType::Byte);
    values().resize(values().size() + 2);  // no biases
    values().emplace_back(std::int64_t{24});
    for (const char* text : {"int4-g32", "moepack", "silu"}) add_text(text);
    for (const double number : {1.0, 0.0, 0.0, 0.0}) values().emplace_back(number);
    for (int i = 0; i < 2; ++i) values().emplace_back(false);
    add(out_.data(), {kT, 40}, ScalarType::Float);
  }

  const std::vector<float>& out() const { return out_; }
  std::vector<float> expected() const { return made::experts(layer_, x_, routing_); }
  std::vector<std::int64_t>& ids() { return routing_.ids; }

  Error run(std::size_t arguments = SIZE_MAX, std::size_t memory = 1 << 20) {
    const auto found = executorch::runtime::get_op_function_from_registry("moepack::quantized_experts.out");
    EXPECT_TRUE(found.ok());
    return Arguments::run(*found, arguments, memory);
  }

 private:
  static constexpr SizesType kT = 3, kK = 2, kE = 4;

  made::Layer layer_;
  made::Routing routing_;
  std::vector<float> x_, out_;
};

class ExecuTorchOps : public testing::Test {
 protected:
  static void SetUpTestSuite() { executorch::runtime::runtime_init(); }

  static void expect_refused(Call& call, const std::string& what) {
    EXPECT_EQ(call.run(), Error::InvalidArgument) << what;
    for (const float value : call.out()) EXPECT_EQ(value, 7.0f) << what;
  }
};

TEST_F(ExecuTorchOps, GivesTheBitsOfTheCore) {
  Call call;
  ASSERT_EQ(call.run(), Error::Ok);
  EXPECT_TRUE(made::same(call.out(), call.expected()));
}

TEST_F(ExecuTorchOps, RefusesValuesOfAnotherKind) {
  const std::size_t count = Call().values().size();
  ASSERT_EQ(count, 18u);
  const EValue replacements[] = {EValue(), EValue(std::int64_t{3}), EValue(0.5), EValue(true)};
  int refused = 0;
  for (std::size_t i = 0; i < count; ++i)
    for (const EValue& replacement : replacements) {
      Call call;
      if (call.values()[i].tag == replacement.tag) continue;
      call.values()[i] = replacement;
      expect_refused(call, "argument " + std::to_string(i));
      ++refused;
    }
  EXPECT_GT(refused, 60);
}

TEST_F(ExecuTorchOps, RefusesATensorWhereAnAttributeIsExpected) {
  for (std::size_t i = 7; i < 17; ++i) {
    Call call;
    call.values()[i] = call.values()[0];
    expect_refused(call, "argument " + std::to_string(i));
  }
}

TEST_F(ExecuTorchOps, RefusesTooFewArguments) {
  for (std::size_t count = 0; count < 18; ++count) {
    Call call;
    EXPECT_EQ(call.run(count), Error::InvalidArgument) << count;
  }
}

TEST_F(ExecuTorchOps, RefusesShapesAndDtypes) {
  struct Case {
    std::size_t position;
    std::vector<SizesType> sizes;
    ScalarType type;
  };
  for (const Case& c : {Case{0, {3, 40, 1}, ScalarType::Float},
                        {0, {120}, ScalarType::Float},
                        {0, {3, 40}, ScalarType::Int},
                        {0, {4, 30}, ScalarType::Float},
                        {1, {3, 2}, ScalarType::Float},
                        {1, {2, 3}, ScalarType::Long},
                        {2, {6}, ScalarType::Float},
                        {3, {4}, ScalarType::Byte},
                        {4, {2, 64}, ScalarType::Byte},
                        {17, {3, 39}, ScalarType::Float},
                        {17, {120}, ScalarType::Float},
                        {17, {3, 40}, ScalarType::Int}}) {
    Call call;
    call.set(c.position, call.data(c.position), c.sizes, c.type);
    expect_refused(call, "argument " + std::to_string(c.position));
  }
}

TEST_F(ExecuTorchOps, RefusesAnotherDimensionOrder) {
  Call call;
  call.set(0, executorch::extension::make_tensor_ptr({3, 40}, std::vector<float>(120), {1, 0}, {1, 3}));
  expect_refused(call, "x in column order");
}

TEST_F(ExecuTorchOps, RefusesTensorsWithoutData) {
  for (const std::size_t position : {0, 1, 2, 3, 4, 17}) {
    Call call;
    const auto tensor = call.values()[position].toTensor();
    call.set(position, nullptr, {tensor.sizes().begin(), tensor.sizes().end()}, tensor.scalar_type());
    expect_refused(call, "argument " + std::to_string(position));
  }
}

// Ids are checked before anything is written: an output over them could put others in their place.
TEST_F(ExecuTorchOps, RefusesAnOutputOverAnInput) {
  for (const std::size_t position : {0, 1, 2, 3, 4}) {
    Call call;
    call.set(17, call.data(position), {3, 40}, ScalarType::Float);
    EXPECT_EQ(call.run(), Error::InvalidArgument) << "argument " << position;
  }
  std::vector<float> both(240, 0.5f);  // x, then out
  for (const std::size_t begin : {0, 1, 119, 120}) {
    Call call;
    call.set(0, both.data(), {3, 40}, ScalarType::Float);
    call.set(17, both.data() + begin, {3, 40}, ScalarType::Float);
    EXPECT_EQ(call.run(), begin == 120 ? Error::Ok : Error::InvalidArgument) << begin;
  }
}

TEST_F(ExecuTorchOps, RefusesIdsThatAreOutOfRange) {
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{4}, std::int64_t{1} << 40}) {
    Call call;
    call.ids()[5] = bad;
    expect_refused(call, "id " + std::to_string(bad));
  }
}

TEST_F(ExecuTorchOps, SaysWhenTheWorkspaceDoesNotFit) {
  Call call;
  EXPECT_EQ(call.run(SIZE_MAX, 64), Error::MemoryAllocationFailed);
}

}  // namespace
}  // namespace moepack
