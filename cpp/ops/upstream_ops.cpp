// ExecuTorch's own `llama::quantized_moe_ffn.out` on moepack's kernel, for those who ask for it.
#include <executorch/runtime/kernel/operator_registry.h>

#include <atomic>
#include <cfloat>
#include <cstring>

#include "executorch_call.h"
#include "moepack/executorch_ops.h"
#include "moepack/scheme.h"

namespace {

using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;
using moepack::Status;
using moepack::ops::Call;
using moepack::ops::RuntimeStack;

constexpr const char* kName = "llama::quantized_moe_ffn.out";
// Dtype and order of dimensions of x, gate_weight, expert_bias, packed_w13, packed_w2, out and the result. A kernel
// with a key goes before one without, which upstream's is; one that is registered with upstream's name alone ends the
// process.
constexpr const char* kKey = "v1/6;0,1|6;0,1|6;0|0;0,1|0;0,1|6;0,1|6;0,1";

std::atomic<bool> accelerated{false};

// The name of the scheme, or an empty one.
std::string_view scheme_name(std::int64_t bits, std::int64_t group) {
  for (const moepack::Scheme* s = moepack::schemes_begin(); s != moepack::schemes_end(); ++s) {
    const bool has_bits =
        (s->cell == moepack::Cell::int4 && bits == 4) || (s->cell == moepack::Cell::int8 && bits == 8);
    if (has_bits && s->group == group) return s->name;
  }
  return {};
}

// What upstream's arguments say twice, or can say and upstream's kernel does not compute.
Status check_upstream(const Call& call, std::int64_t experts, std::int64_t dim, std::int64_t bits, std::int64_t group) {
  using moepack::ops::Element;
  if (Status status = expect(call.x, {Element::float32}, {{"T"}, {"D", dim}}); !status.ok()) return status;
  if (Status status = expect(call.gate_weight, {Element::float32}, {{"E", experts}, {"D", dim}}); !status.ok())
    return status;
  if (call.experts.scheme.empty())
    return Status::error("%lld-bit codes in groups of %lld; supported: 4 and 8 bits, groups of 32, 64 and 128",
                         static_cast<long long>(bits), static_cast<long long>(group));
  const std::string_view score = call.routing.score_func;
  if (score != "sigmoid" && score != "softmax")
    return Status::error("score_func '%.*s' is not supported; supported: sigmoid, softmax",
                         static_cast<int>(score.size()), score.data());
  if (call.expert_bias.given && score != "sigmoid")
    return Status::error("expert_bias is supported with score_func sigmoid alone");
  return {};
}

// Upstream's arguments, in the order of its schema, as moepack's.
Call read_upstream_call(RuntimeStack& in, Status& refused) {
  Call call;
  call.op = "llama::quantized_moe_ffn";
  call.routed = true;
  call.x = in.tensor("x");
  call.gate_weight = in.tensor("gate_weight");
  call.expert_bias = in.tensor("expert_bias");
  if (call.expert_bias.rank == 1 && call.expert_bias.sizes[0] == 0) call.expert_bias = {"expert_bias"};  // not given
  call.packed_w13 = in.tensor("packed_w13");
  call.packed_w2 = in.tensor("packed_w2");
  call.num_activated_experts = in.integer();
  const std::int64_t experts = in.integer();
  call.hidden_dim = in.integer();
  const std::int64_t dim = in.integer(), group = in.integer(), bits = in.integer();
  call.routing.score_func = in.text();
  const double route_scale = in.number();
  const bool sigmoid = call.routing.score_func == "sigmoid";
  call.routing.norm_topk = sigmoid;
  call.routing.norm_eps = FLT_MIN;
  call.routing.norm_clamp = true;
  call.routing.route_scale = sigmoid ? route_scale : 1.0;
  call.routing.group_score = "top2sum";
  call.routing.router_dtype = "float32";
  call.experts.scheme = scheme_name(bits, group);
  call.experts.layout = "torchao";
  call.experts.activation = "silu";
  refused = check_upstream(call, experts, dim, bits, group);
  return call;
}

void kernel(KernelRuntimeContext& context, Span<EValue*> stack) {
  if (accelerated) return moepack::ops::run_kernel(context, stack, kName, read_upstream_call);
  const auto upstream = executorch::runtime::get_op_function_from_registry(kName);
  if (upstream.ok()) return (*upstream)(context, stack);
  ET_LOG(Error, "%s: handed back to ExecuTorch's own kernel, which is not in this process", kName);
  context.fail(Error::OperatorMissing);
}

bool register_once() {
  static const Kernel keyed(kName, executorch::runtime::KernelKey(kKey), kernel);
  for (const Kernel& other : executorch::runtime::get_registered_kernels())
    if (std::strcmp(other.name_, kName) == 0 && other.kernel_key_ == keyed.kernel_key_) return false;
  return executorch::runtime::register_kernel(keyed) == Error::Ok;
}

}  // namespace

extern "C" [[gnu::visibility("default")]] void moepack_accelerate_upstream(bool on) {
  if (on) {
    [[maybe_unused]] static const bool registered = register_once();
  }
  accelerated = on;
}
