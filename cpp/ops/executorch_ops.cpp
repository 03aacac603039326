// The operators for ExecuTorch.
#include <executorch/runtime/kernel/operator_registry.h>

#include <cstring>

#include "executorch_call.h"
#include "isa_switch.h"

namespace {

using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

template <bool routed>
void kernel(KernelRuntimeContext& context, Span<EValue*> stack) {
  const char* name = routed ? "moepack::quantized_moe_ffn.out" : "moepack::quantized_experts.out";
  moepack::ops::run_kernel(context, stack, name, [](moepack::ops::RuntimeStack& in, moepack::Status&) {
    return moepack::ops::read_call(in, routed);
  });
}

// ExecuTorch aborts the process when a kernel is registered twice: linked in and loaded, or two copies of this library.
const bool registered = [] {
  static const executorch::runtime::Kernel kernels[] = {
      executorch::runtime::Kernel("moepack::quantized_moe_ffn.out", kernel<true>),
      executorch::runtime::Kernel("moepack::quantized_experts.out", kernel<false>),
  };
  for (const executorch::runtime::Kernel& other : executorch::runtime::get_registered_kernels())
    if (std::strcmp(other.name_, kernels[0].name_) == 0) return true;
  return executorch::runtime::register_kernels({kernels, 2}) == Error::Ok;
}();

}  // namespace
