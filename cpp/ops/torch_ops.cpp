// The operators for torch, on its stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "isa_switch.h"

namespace {

using moepack::ops::Call;
using moepack::ops::TensorArgument;
using torch::stable::Tensor;

struct DeleteText {
  void operator()(StringHandle text) const { torch_delete_string(text); }
};
using OwnedText = std::unique_ptr<StringOpaque, DeleteText>;

// Reads a boxed call and owns what it has read.
class TorchStack {
 public:
  explicit TorchStack(const StableIValue* stack) : next_(stack) { tensors_.reserve(kMaxTensors); }

  Tensor value() { return torch::stable::detail::to<Tensor>(*next_++); }

  TensorArgument tensor(const char* name) { return keep(name, value()); }
  TensorArgument optional_tensor(const char* name) {
    auto found = torch::stable::detail::to<std::optional<Tensor>>(*next_++);
    return found ? keep(name, std::move(*found)) : TensorArgument{name};
  }
  std::int64_t integer() { return torch::stable::detail::to<std::int64_t>(*next_++); }
  double number() { return torch::stable::detail::to<double>(*next_++); }
  bool flag() { return torch::stable::detail::to<bool>(*next_++); }

  // to<std::string> of torch 2.13 leaks a string per call.
  std::string_view text() {
    OwnedText& text = texts_.at(text_count_++);
    text.reset(torch::stable::detail::to<StringHandle>(*next_++));
    const char* data = nullptr;
    std::size_t length = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(text.get(), &data));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(text.get(), &length));
    return {data, length};
  }

  // Contiguous data for every argument of a call that has passed the checks.
  void fill_data(Call& call) {
    auto tensor = tensors_.begin();
    moepack::ops::for_each_given(call, [&tensor](TensorArgument& argument) {
      if (!tensor->is_contiguous()) *tensor = torch::stable::contiguous(*tensor);
      argument.data = tensor->const_data_ptr();
      ++tensor;
    });
  }

  const Tensor& x() const { return tensors_.front(); }

  static TensorArgument describe(const char* name, const Tensor& tensor) {
    TensorArgument argument{name, tensor.defined()};  // None comes as a tensor that is not
    if (!argument.given) return argument;
    argument.element = static_cast<int>(tensor.scalar_type());
    const auto sizes = tensor.sizes();
    argument.rank = static_cast<int>(sizes.size());
    for (int i = 0; i < argument.rank && i < TensorArgument::kMaxRank; ++i) argument.sizes[i] = sizes[i];
    return argument;
  }

 private:
  TensorArgument keep(const char* name, Tensor tensor) {
    const TensorArgument argument = describe(name, tensor);
    if (argument.given) tensors_.push_back(std::move(tensor));
    return argument;
  }

  static constexpr std::size_t kMaxTensors = 9, kMaxTexts = 6;  // of the schemas below

  const StableIValue* next_;
  std::vector<Tensor> tensors_;
  std::array<OwnedText, kMaxTexts> texts_;
  std::size_t text_count_ = 0;
};

void require(const Call& call, const moepack::Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(call.op) + ": " + status.message());
}

void run_on_torch(void*, int count, void (*body)(void* argument, int i), void* argument) {
  torch::stable::parallel_for(0, count, 1, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(argument, static_cast<int>(i));
  });
}

constexpr std::align_val_t kAlignment{64};
struct DeleteAligned {
  void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
};

void compute(const Call& call, void* out) {
  const moepack::ParallelFor pool{static_cast<int>(torch::stable::get_num_threads()), run_on_torch, nullptr};
  const std::size_t bytes = moepack::ops::workspace_bytes(call, pool.threads);
  const std::unique_ptr<std::byte, DeleteAligned> workspace(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
  require(call, moepack::ops::run(call, out, workspace.get(), pool));
}

// Not through the dispatcher, which costs as much as a small call's whole computation.
Tensor fresh_output(const Tensor& x) {
  const std::int64_t strides[] = {x.size(1), 1};
  std::int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  AtenTensorHandle out = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(2, x.sizes().data(), strides, dtype, aoti_torch_device_type_cpu(), 0, &out));
  return Tensor(out);
}

Call checked_call(TorchStack& in, bool routed) {
  Call call = moepack::ops::read_call(in, routed);
  require(call, moepack::ops::check(call));
  in.fill_data(call);
  return call;
}

template <bool routed>
void functional(StableIValue* stack, std::uint64_t, std::uint64_t) {
  TorchStack in(stack);
  const Call call = checked_call(in, routed);
  const Tensor out = fresh_output(in.x());
  compute(call, out.mutable_data_ptr());
  stack[0] = torch::stable::detail::from(out);
}

bool overlaps(Call& call, const Tensor& out) {
  return moepack::ops::input_within(call, out.const_data_ptr(), out.numel() * out.element_size()) != nullptr;
}

template <bool routed>
void with_out(StableIValue* stack, std::uint64_t, std::uint64_t) {
  TorchStack in(stack);
  Call call = moepack::ops::read_call(in, routed);
  Tensor out = in.value();
  require(call, moepack::ops::check(call));
  require(call, moepack::ops::check_out(call, TorchStack::describe("out", out)));
  in.fill_data(call);
  if (out.is_contiguous() && !overlaps(call, out)) {
    compute(call, out.mutable_data_ptr());
  } else {
    const Tensor whole = fresh_output(in.x());
    compute(call, whole.mutable_data_ptr());
    torch::stable::copy_(out, whole);
  }
  stack[0] = torch::stable::detail::from(out);
}

// Whoever can call this has the kernels.
void active(StableIValue* stack, std::uint64_t, std::uint64_t) { stack[0] = torch::stable::detail::from(true); }

}  // namespace

#define MOEPACK_FFN_ARGUMENTS                                                                                     \
  "Tensor x, Tensor? router_x, Tensor gate_weight, Tensor? gate_bias, Tensor? expert_bias, Tensor packed_w13, "   \
  "Tensor packed_w2, Tensor? bias13, Tensor? bias2, int num_activated_experts, int hidden_dim, str scheme, "      \
  "str layout, str score_func, bool norm_topk, float norm_eps, bool norm_clamp, float route_scale, int n_group, " \
  "int topk_group, str group_score, str router_dtype, str activation, float act_alpha, float act_limit, "         \
  "float gate_softcap, float up_softcap, bool limit_after_act, bool weight_on_input"
#define MOEPACK_EXPERTS_ARGUMENTS                                                                             \
  "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor packed_w13, Tensor packed_w2, Tensor? bias13, "     \
  "Tensor? bias2, int hidden_dim, str scheme, str layout, str activation, float act_alpha, float act_limit, " \
  "float gate_softcap, float up_softcap, bool limit_after_act, bool weight_on_input"

STABLE_TORCH_LIBRARY(moepack, library) {
  library.def("quantized_moe_ffn(" MOEPACK_FFN_ARGUMENTS ") -> Tensor");
  library.def("quantized_moe_ffn.out(" MOEPACK_FFN_ARGUMENTS ", *, Tensor(a!) out) -> Tensor(a!)");
  library.def("quantized_experts(" MOEPACK_EXPERTS_ARGUMENTS ") -> Tensor");
  library.def("quantized_experts.out(" MOEPACK_EXPERTS_ARGUMENTS ", *, Tensor(a!) out) -> Tensor(a!)");
  library.def("_quantized_moe_ffn_active() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(moepack, CPU, library) {
  library.impl("quantized_moe_ffn", functional<true>);
  library.impl("quantized_moe_ffn.out", with_out<true>);
  library.impl("quantized_experts", functional<false>);
  library.impl("quantized_experts.out", with_out<false>);
}

STABLE_TORCH_LIBRARY_IMPL(moepack, CompositeExplicitAutograd, library) {
  library.impl("_quantized_moe_ffn_active", active);
}
