// What automatic differentiation meets: the operators have no gradient and say so. The stable ABI can neither see
// whether a tensor requires a gradient nor hand a call on to the next dispatch key, so this file is compiled for one
// release of torch.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>

namespace {

[[noreturn]] void refuse(const std::string& op) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op,
                              " has no gradient: packed experts are for inference. Run it under torch.no_grad(), or "
                              "turn the model back into float modules with moepack.dequantize_");
}

// The place of the operator in a graph of gradients, which backward() finds.
struct NoGradient : torch::autograd::Node {
  explicit NoGradient(std::string op) : op(std::move(op)) {}

  std::string name() const override { return "NoGradient"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { refuse(op); }

  std::string op;
};

torch::autograd::edge_list gradient_edges(c10::ArrayRef<c10::IValue> arguments, const std::string& op) {
  torch::autograd::edge_list edges;
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor()) continue;
    const at::Tensor& tensor = argument.toTensor();
    if (torch::autograd::isFwGradDefined(tensor)) refuse(op);
    if (at::GradMode::is_enabled() && tensor.requires_grad())
      edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  return edges;
}

// Where nothing asks for a gradient, only hands the call on. An output that the caller brings cannot carry a refusal to
// backward().
void without_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  torch::autograd::edge_list edges = gradient_edges(torch::jit::last(*stack, op.schema().arguments().size()), name);
  if (!edges.empty() && op.schema().is_mutable()) refuse(name);
  {
    const at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  if (edges.empty()) return;
  const auto node = c10::make_intrusive<NoGradient>(name);
  node->set_next_edges(std::move(edges));
  torch::autograd::set_history(stack->back().toTensor(), node);
}

}  // namespace

TORCH_LIBRARY_IMPL(moepack, Autograd, library) {
  for (const char* name : {"quantized_moe_ffn", "quantized_moe_ffn.out", "quantized_experts", "quantized_experts.out"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&without_gradient>());
}

// A tensor that is written to gets a new version.
TORCH_LIBRARY_IMPL(moepack, ADInplaceOrView, library) {
  for (const char* name : {"quantized_moe_ffn.out", "quantized_experts.out"})
    library.impl(name, torch::autograd::autogradNotImplementedInplaceOrViewFallback());
}
