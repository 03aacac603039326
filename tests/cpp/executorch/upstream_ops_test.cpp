// ExecuTorch's own operator on moepack's kernel: never by itself, in whatever order its own kernel comes, with errors
// where that one ends the process.
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/runtime.h>
#include <gtest/gtest.h>

#include <cfloat>
#include <string>
#include <vector>

#include "../made_universal.h"
#include "arguments.h"
#include "moepack/executorch_ops.h"

namespace moepack {
namespace {

using executorch::aten::DimOrderType;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::OpFunction;
using executorch::runtime::Result;
using executorch::runtime::TensorMeta;

constexpr const char* kName = "llama::quantized_moe_ffn.out";
constexpr SizesType kT = 3, kD = 64, kF = 32, kE = 4, kK = 2;
enum Position { kX, kGate, kBias, kW13, kW2, kTopK, kExperts, kInner, kWidth, kGroup, kBits, kScore, kScale, kOut };

// What a method looks a kernel up with when it is loaded.
Result<OpFunction> found() {
  static DimOrderType order[] = {0, 1};
  std::vector<TensorMeta> metas;
  for (const ScalarType type : {ScalarType::Float, ScalarType::Float, ScalarType::Float, ScalarType::Byte,
                                ScalarType::Byte, ScalarType::Float, ScalarType::Float})
    metas.emplace_back(type, executorch::runtime::Span<DimOrderType>(order, metas.size() == kBias ? 1 : 2));
  return executorch::runtime::get_op_function_from_registry(kName, {metas.data(), metas.size()});
}

class UpstreamCall : public made::Arguments {
 public:
  explicit UpstreamCall(const char* score = "sigmoid", bool biased = true)
      : layer_(made::twins(*find_scheme("int4-g32"), kD, kF, kE).universal), score_(score), biased_(biased) {
    made::Random random(3);
    x_ = random.floats(kT * kD);
    gate_ = random.floats(kE * kD);
    bias_ = random.floats(kE);
    out_.assign(x_.size(), 7.0f);
    add(x_.data(), {kT, kD}, ScalarType::Float);
    add(gate_.data(), {kE, kD}, ScalarType::Float);
    add(bias_.data(), {biased ? kE : 0}, ScalarType::Float);
    add(layer_.w13.data(), {kE, static_cast<SizesType>(layer_.bytes13)}, ScalarType::Byte);
    add(layer_.w2.data(), {kE, static_cast<SizesType>(layer_.bytes2)}, ScalarType::Byte);
    for (const std::int64_t number : {kK, kE, kF, kD, 32, 4}) values().emplace_back(number);
    add_text(score);
    values().emplace_back(2.5);
    add(out_.data(), {kT, kD}, ScalarType::Float);
    values().push_back(values().back());  // the result is the output
  }

  const std::vector<float>& out() const { return out_; }

  // The core's own operator, with upstream's meaning of its arguments.
  std::vector<float> expected() const {
    const bool sigmoid = score_ == "sigmoid";
    RoutingAttributes routing;
    routing.score_func = score_;
    routing.norm_topk = sigmoid;
    routing.norm_eps = FLT_MIN;
    routing.norm_clamp = true;
    routing.route_scale = sigmoid ? 2.5 : 1.0;
    routing.group_score = "top2sum";
    routing.router_dtype = "float32";
    const RouterTensors router{nullptr, gate_.data(), nullptr, biased_ ? bias_.data() : nullptr};
    const Shape shape = layer_.shape(kT, kK);
    made::Workspace workspace(ffn_workspace_bytes(shape, layer_.attributes(), 1));
    std::vector<float> out(x_.size());
    const Status status = quantized_moe_ffn(shape, routing, router, layer_.attributes(), layer_.tensors(), x_.data(),
                                            DType::f32, out.data(), workspace.base(), serial());
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

 private:
  made::Layer layer_;
  std::string score_;
  bool biased_;
  std::vector<float> x_, gate_, bias_, out_;
};

// In the place of ExecuTorch's own kernel, which is not in the libraries for C++.
void others(executorch::runtime::KernelRuntimeContext&, executorch::runtime::Span<EValue*> stack) {
  *stack[kOut]->toTensor().mutable_data_ptr<float>() = 42.0f;
}

void expect_refused(UpstreamCall& call, const std::string& what) {
  EXPECT_EQ(call.run(*found()), Error::InvalidArgument) << what;
  for (const float value : call.out()) EXPECT_EQ(value, 7.0f) << what;
}

// One process, one registry, in which nothing is ever undone: the steps are in order.
class UpstreamOps : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    executorch::runtime::runtime_init();
    ASSERT_FALSE(found().ok()) << "registered without being asked";
    accelerate_upstream();
    accelerate_upstream();
    ASSERT_TRUE(found().ok());
    restore_upstream();
    UpstreamCall call;
    ASSERT_EQ(call.run(*found()), Error::OperatorMissing);
    accelerate_upstream();
  }
};

TEST_F(UpstreamOps, GivesTheBitsOfTheCore) {
  for (const bool biased : {false, true}) {
    UpstreamCall call("sigmoid", biased);
    ASSERT_EQ(call.run(*found()), Error::Ok);
    EXPECT_TRUE(made::same(call.out(), call.expected()));
  }
  UpstreamCall call("softmax", false);
  ASSERT_EQ(call.run(*found()), Error::Ok);
  EXPECT_TRUE(made::same(call.out(), call.expected()));
}

TEST_F(UpstreamOps, RefusesWhatEndsTheProcessThere) {
  const auto number = [](Position position, std::int64_t value, const std::string& what) {
    UpstreamCall call;
    call.values()[position] = EValue(value);
    expect_refused(call, what);
  };
  number(kTopK, kE + 1, "more activated experts than there are");
  number(kTopK, 0, "no activated experts");
  number(kExperts, kE - 1, "fewer experts than the tensors hold");
  number(kInner, kF * 2, "another inner size");
  number(kWidth, kD * 2, "another width");
  number(kGroup, 48, "groups of 48");
  number(kGroup, 64, "groups wider than the inner size");
  number(kBits, 3, "3 bits");
  number(kBits, 8, "8 bits over 4-bit blobs");
  for (const char* score : {"softmax", "softmax_all", "tanh", ""}) {
    UpstreamCall call;
    call.set_text(kScore, score);
    expect_refused(call, std::string("a bias, or a score function: ") + score);
  }
}

TEST_F(UpstreamOps, RefusesShapesDtypesAndKinds) {
  struct Case {
    Position position;
    made::Arguments::Sizes sizes;
    ScalarType type;
  };
  for (const Case& c : {Case{kX, {kT, kD, 1}, ScalarType::Float}, Case{kX, {kT, kD}, ScalarType::BFloat16},
                        Case{kX, {kT, kD / 2}, ScalarType::Float}, Case{kGate, {kE, kD}, ScalarType::Half},
                        Case{kGate, {kE / 2, kD}, ScalarType::Float}, Case{kBias, {kE - 1}, ScalarType::Float},
                        Case{kBias, {kE}, ScalarType::Int}, Case{kBias, {2, 2}, ScalarType::Float},
                        Case{kW13, {kE, 64}, ScalarType::Byte}, Case{kW2, {kE * 64}, ScalarType::Byte},
                        Case{kOut, {kT, kD / 2}, ScalarType::Float}}) {
    UpstreamCall call;
    call.set(c.position, call.data(c.position), c.sizes, c.type);
    expect_refused(call, "argument " + std::to_string(c.position));
  }
  for (int position = 0; position <= kOut; ++position) {
    UpstreamCall call;
    call.values()[static_cast<std::size_t>(position)] = EValue(true);
    expect_refused(call, "a bool for argument " + std::to_string(position));
    UpstreamCall shorter;
    EXPECT_EQ(shorter.run(*found(), static_cast<std::size_t>(position)), Error::InvalidArgument) << position;
  }
}

TEST_F(UpstreamOps, RefusesForeignBlobs) {
  UpstreamCall call;
  static_cast<std::uint8_t*>(call.data(kW2))[0] ^= 1;
  for (std::size_t e = 1; e < kE; ++e)
    static_cast<std::uint8_t*>(call.data(kW2))[e * static_cast<std::size_t>(call.values()[kW2].toTensor().size(1))] ^=
        1;
  expect_refused(call, "foreign blobs");
}

// From here on the registry has ExecuTorch's own kernel too.
TEST_F(UpstreamOps, GoesBeforeUpstreamsOwnKernelUntilItIsHandedBack) {
  static const executorch::runtime::Kernel own(kName, others);
  ASSERT_EQ(executorch::runtime::register_kernel(own), Error::Ok);
  UpstreamCall call;
  ASSERT_EQ(call.run(*found()), Error::Ok);
  EXPECT_TRUE(made::same(call.out(), call.expected()));
  const OpFunction loaded = *found();
  restore_upstream();
  EXPECT_EQ(call.run(loaded), Error::Ok);
  EXPECT_EQ(call.out()[0], 42.0f);
  accelerate_upstream();
  EXPECT_EQ(call.run(loaded), Error::Ok);
  EXPECT_TRUE(made::same(call.out(), call.expected()));
}

}  // namespace
}  // namespace moepack
