// A kernel call of ExecuTorch, whichever operator it is of: its values read, checked, computed. Nothing here throws or
// aborts, whatever a program file says: an argument of the wrong kind, a tensor without data, a foreign blob are all
// Error::InvalidArgument.
#pragma once

#include <executorch/runtime/core/event_tracer_hooks.h>
#include <executorch/runtime/core/exec_aten/util/dim_order_util.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include "arguments.h"

namespace moepack::ops {

using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

// Reads the values of a kernel call; the first that is not what the schema says is kept in status().
class RuntimeStack {
 public:
  explicit RuntimeStack(Span<EValue*> stack) : stack_(stack) {}

  const Status& status() const { return status_; }

  TensorArgument tensor(const char* name) {
    EValue* value = next(name);
    if (value && value->isTensor()) return describe(name, value->toTensor());
    refuse(name, "a tensor");
    return {name};
  }
  TensorArgument optional_tensor(const char* name) {
    EValue* value = next(name);
    if (value && value->isTensor()) return describe(name, value->toTensor());
    if (value && !value->isNone()) refuse(name, "a tensor or none");
    return {name};
  }
  // The last argument; nullptr if it is missing.
  Tensor* out() {
    EValue* value = next("out");
    if (value && value->isTensor()) return &value->toTensor();
    refuse("out", "a tensor");
    return nullptr;
  }
  std::int64_t integer() { return scalar(next("an int"), &EValue::tryToInt, "an int"); }
  double number() { return scalar(next("a float"), &EValue::tryToDouble, "a float"); }
  bool flag() { return scalar(next("a bool"), &EValue::tryToBool, "a bool"); }
  std::string_view text() { return scalar(next("a string"), &EValue::tryToString, "a string"); }

  static bool default_order(const Tensor& tensor) {
    const auto order = tensor.dim_order();
    return executorch::runtime::is_contiguous_dim_order(order.data(), order.size());
  }

 private:
  EValue* next(const char* what) {
    if (position_ < stack_.size() && stack_[position_]) return stack_[position_++];
    refuse(what, "more arguments");
    return nullptr;
  }

  void refuse(const char* what, const char* expected) {
    if (status_.ok()) status_ = Status::error("argument %zu (%s): expected %s", position_, what, expected);
  }

  template <class T>
  T scalar(EValue* value, executorch::runtime::Result<T> (EValue::*read)() const, const char* expected) {
    if (!value) return T{};
    auto result = (value->*read)();
    if (result.ok()) return *result;
    refuse("attribute", expected);
    return T{};
  }

  TensorArgument describe(const char* name, const Tensor& tensor) {
    TensorArgument argument{name, true};
    argument.element = static_cast<int>(tensor.scalar_type());
    argument.rank = static_cast<int>(tensor.dim());
    for (int i = 0; i < argument.rank && i < TensorArgument::kMaxRank; ++i) argument.sizes[i] = tensor.size(i);
    argument.data = tensor.const_data_ptr();
    if (status_.ok() && !default_order(tensor))
      status_ = Status::error("%s: its dimension order is not the default (contiguous) one", name);
    if (status_.ok() && tensor.numel() > 0 && !argument.data) status_ = Status::error("%s: has no data", name);
    return argument;
  }

  Span<EValue*> stack_;
  std::size_t position_ = 0;
  Status status_;
};

// Gives `out` the shape of x. An output whose dtype, order, capacity or place does not fit is refused.
inline Status shape_output(Call& call, Tensor& out) {
  if (static_cast<int>(out.scalar_type()) != call.x.element)
    return Status::error("out: got %s, expected the dtype of x, %s", element_name(static_cast<int>(out.scalar_type())),
                         element_name(call.x.element));
  const executorch::aten::SizesType sizes[] = {static_cast<executorch::aten::SizesType>(call.shape.T),
                                               static_cast<executorch::aten::SizesType>(call.shape.D)};
  if (out.dim() != 2 || !RuntimeStack::default_order(out) ||
      executorch::runtime::resize_tensor(out, {sizes, 2}) != Error::Ok)
    return Status::error("out: cannot take the shape [T=%d, D=%d]", sizes[0], sizes[1]);
  if (out.numel() > 0 && !out.mutable_data_ptr()) return Status::error("out: has no data");
  if (const char* input = input_within(call, out.const_data_ptr(), out.nbytes()))
    return Status::error("out: shares memory with %s; it needs memory of its own", input);
  return {};
}

inline void run_on_executorch(void* failed, int count, void (*body)(void* argument, int i), void* argument) {
  const bool ran = executorch::extension::parallel_for(0, count, 1, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(argument, static_cast<int>(i));
  });
  if (!ran) *static_cast<bool*>(failed) = true;
}

inline Error compute(KernelRuntimeContext& context, const Call& call, Tensor& out, Status& status) {
  const auto threads = static_cast<int>(executorch::extension::get_thread_count());
  bool failed = false;
  const ParallelFor pool{threads > 0 ? threads : 1, run_on_executorch, &failed};
  constexpr std::size_t kAlignment = 64;
  const std::size_t bytes = workspace_bytes(call, pool.threads);
  const auto workspace = context.allocate_temp(bytes > 0 ? bytes : kAlignment, kAlignment);
  if (!workspace.ok()) {
    status = Status::error("no room for the workspace in the temporary allocator");
    return workspace.error();
  }
  status = run(call, out.mutable_data_ptr(), *workspace, pool);
  if (status.ok() && failed) {
    status = Status::error("the thread pool did not run the work");
    return Error::Internal;
  }
  return status.ok() ? Error::Ok : Error::InvalidArgument;
}

// `read` makes a Call of the values in front of `out`; what it refuses goes into the Status.
template <class Read>
void run_kernel(KernelRuntimeContext& context, Span<EValue*> stack, [[maybe_unused]] const char* name, Read read) {
#ifndef __clang_analyzer__  // takes the tracer's level to change between begin and end
  const executorch::runtime::internal::EventTracerProfileOpScope scope(context.internal_event_tracer(), name);
#endif
  RuntimeStack in(stack);
  Status refused;
  Call call = read(in, refused);
  Tensor* out = in.out();
  Status status = in.status();
  if (status.ok()) status = refused;
  if (status.ok()) status = check(call);
  if (status.ok()) status = shape_output(call, *out);
  const Error error = status.ok() ? compute(context, call, *out, status) : Error::InvalidArgument;
  if (error != Error::Ok) {
    ET_LOG(Error, "%s: %s", call.op, status.message());
    context.fail(error);
    return;
  }
  EValue result(*out);
  executorch::runtime::internal::event_tracer_log_evalue(context.internal_event_tracer(), result);
}

}  // namespace moepack::ops
