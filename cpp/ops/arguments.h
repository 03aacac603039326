// The operators' arguments as every binding sees them: read in the order of the schema, checked, run. Said once, so
// that torch (eager), its Meta kernels (through moepack._core) and ExecuTorch refuse alike.
//
// A binding brings a Stack that yields the next argument:
//   TensorArgument tensor(const char* name), optional_tensor(const char* name);
//   std::int64_t integer(); double number(); bool flag(); std::string_view text();
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string_view>

#include "moepack/ffn.h"
#include "moepack/status.h"

namespace moepack::ops {

// The numbers of c10::ScalarType, which torch and ExecuTorch share.
enum class Element : int { uint8 = 0, int64 = 4, float16 = 5, float32 = 6, bfloat16 = 15 };

constexpr const char* kElementNames[] = {"uint8",   "int8",    "int16",     "int32",     "int64",      "float16",
                                         "float32", "float64", "complex32", "complex64", "complex128", "bool",
                                         "qint8",   "quint8",  "qint32",    "bfloat16"};
constexpr int kElementCount = sizeof kElementNames / sizeof *kElementNames;

inline const char* element_name(int element) {
  return element >= 0 && element < kElementCount ? kElementNames[element] : "another dtype";
}

inline int element_number(std::string_view name) {
  for (int i = 0; i < kElementCount; ++i)
    if (name == kElementNames[i]) return i;
  return -1;
}

// A size that is not fixed: of a symbolic dimension while tracing, or one that any value fits.
constexpr std::int64_t kAny = -1;

struct TensorArgument {
  static constexpr int kMaxRank = 4;  // of the sizes kept; more are refused anyway

  const char* name = nullptr;
  bool given = false;
  int element = -1;
  int rank = 0;
  std::int64_t sizes[kMaxRank] = {};
  const void* data = nullptr;  // contiguous; set by the binding once check() has passed
};

// One call of quantized_moe_ffn (routed) or of quantized_experts.
struct Call {
  const char* op = nullptr;
  bool routed = false;
  TensorArgument x, router_x, gate_weight, gate_bias, expert_bias;
  TensorArgument topk_ids, topk_weights;
  TensorArgument packed_w13, packed_w2, bias13, bias2;
  ExpertAttributes experts;
  RoutingAttributes routing;
  std::int64_t num_activated_experts = 0, hidden_dim = 0;
  Shape shape{};  // set by check()
};

template <class Stack>
Call read_call(Stack& in, bool routed) {
  Call call;
  call.routed = routed;
  call.op = routed ? "moepack::quantized_moe_ffn" : "moepack::quantized_experts";
  call.x = in.tensor("x");
  if (routed) {
    call.router_x = in.optional_tensor("router_x");
    call.gate_weight = in.tensor("gate_weight");
    call.gate_bias = in.optional_tensor("gate_bias");
    call.expert_bias = in.optional_tensor("expert_bias");
  } else {
    call.topk_ids = in.tensor("topk_ids");
    call.topk_weights = in.tensor("topk_weights");
  }
  call.packed_w13 = in.tensor("packed_w13");
  call.packed_w2 = in.tensor("packed_w2");
  call.bias13 = in.optional_tensor("bias13");
  call.bias2 = in.optional_tensor("bias2");
  if (routed) call.num_activated_experts = in.integer();
  call.hidden_dim = in.integer();
  call.experts.scheme = in.text();
  call.experts.layout = in.text();
  if (routed) {
    call.routing.score_func = in.text();
    call.routing.norm_topk = in.flag();
    call.routing.norm_eps = in.number();
    call.routing.norm_clamp = in.flag();
    call.routing.route_scale = in.number();
    call.routing.n_group = in.integer();
    call.routing.topk_group = in.integer();
    call.routing.group_score = in.text();
    call.routing.router_dtype = in.text();
  }
  call.experts.activation = in.text();
  call.experts.act_alpha = in.number();
  call.experts.act_limit = in.number();
  call.experts.gate_softcap = in.number();
  call.experts.up_softcap = in.number();
  call.experts.limit_after_act = in.flag();
  call.experts.weight_on_input = in.flag();
  return call;
}

// f(argument) for every tensor that was given, in the order of the schema.
template <class F>
void for_each_given(Call& call, F f) {
  for (TensorArgument* argument :
       {&call.x, &call.router_x, &call.gate_weight, &call.gate_bias, &call.expert_bias, &call.topk_ids,
        &call.topk_weights, &call.packed_w13, &call.packed_w2, &call.bias13, &call.bias2})
    if (argument->given) f(*argument);
}

// Of the dtypes that check() lets pass.
inline std::int64_t element_bytes(int element) {
  switch (static_cast<Element>(element)) {
    case Element::uint8:
      return 1;
    case Element::int64:
      return 8;
    case Element::float32:
      return 4;
    default:
      return 2;
  }
}

// The first input that lies, in part, within the `bytes` at `out`, or nullptr. Written over the ids, an output would
// undo the check of them. The call has been checked and has its data.
inline const char* input_within(Call& call, const void* out, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(out), end = begin + bytes;
  const char* found = nullptr;
  for_each_given(call, [&](const TensorArgument& argument) {
    std::int64_t length = element_bytes(argument.element);
    for (int i = 0; i < argument.rank; ++i) length *= argument.sizes[i];
    const auto data = reinterpret_cast<std::uintptr_t>(argument.data);
    if (!found && data < end && begin < data + static_cast<std::size_t>(length)) found = argument.name;
  });
  return found;
}

// A dimension that is expected, by its letter in op.md.
struct Dimension {
  const char* letter;
  std::int64_t size = kAny;
};

// Fixed-size text for messages: no allocation in a runtime.
class Text {
 public:
  template <class... Args>
  void add(const char* format, Args... args) {
    const int written = std::snprintf(text_ + used_, sizeof text_ - used_, format, args...);
    used_ += written < 0 ? 0 : static_cast<std::size_t>(written);
    if (used_ >= sizeof text_) used_ = sizeof text_ - 1;
  }
  const char* c_str() const { return text_; }

 private:
  char text_[120] = {};
  std::size_t used_ = 0;
};

inline Text shape_text(const TensorArgument& argument) {
  Text text;
  text.add("[");
  for (int i = 0; i < argument.rank && i < TensorArgument::kMaxRank; ++i) {
    if (i) text.add(", ");
    if (argument.sizes[i] == kAny)
      text.add("?");
    else
      text.add("%lld", static_cast<long long>(argument.sizes[i]));
  }
  text.add(argument.rank > TensorArgument::kMaxRank ? ", ...]" : "]");
  return text;
}

inline Status mismatch(const TensorArgument& argument, std::initializer_list<Element> elements,
                       std::initializer_list<Dimension> dimensions) {
  Text names, shape;
  for (const Element element : elements)
    names.add(names.c_str()[0] ? " or %s" : "%s", element_name(static_cast<int>(element)));
  for (const Dimension& dimension : dimensions) {
    shape.add(shape.c_str()[0] ? ", %s" : "%s", dimension.letter);
    if (dimension.size != kAny) shape.add("=%lld", static_cast<long long>(dimension.size));
  }
  return Status::error("%s: got %s %s, expected %s [%s]", argument.name, element_name(argument.element),
                       shape_text(argument).c_str(), names.c_str(), shape.c_str());
}

inline Status expect(const TensorArgument& argument, std::initializer_list<Element> elements,
                     std::initializer_list<Dimension> dimensions) {
  if (!argument.given) return Status::error("%s: is None, expected a tensor", argument.name);
  bool fits = argument.rank == static_cast<int>(dimensions.size());
  const std::int64_t* size = argument.sizes;
  for (const Dimension& dimension : dimensions) {
    if (!fits) break;
    fits = dimension.size == kAny || *size == kAny || dimension.size == *size;
    ++size;
  }
  bool listed = false;
  for (const Element element : elements) listed = listed || argument.element == static_cast<int>(element);
  return fits && listed ? Status() : mismatch(argument, elements, dimensions);
}

inline std::int64_t element_count(const TensorArgument& argument) {
  return argument.given ? argument.sizes[0] * argument.sizes[1] : -1;
}

// Ranks, dtypes and the shapes that have to agree; sets call.shape.
inline Status check_tensors(Call& call) {
  constexpr Element f32 = Element::float32;
  Status status = expect(call.x, {f32, Element::bfloat16, Element::float16}, {{"T"}, {"D"}});
  if (!status.ok()) return status;
  const Dimension T{"T", call.x.sizes[0]}, D{"D", call.x.sizes[1]};
  const auto check = [&status](const TensorArgument& argument, Element element,
                               std::initializer_list<Dimension> dimensions) {
    if (status.ok()) status = expect(argument, {element}, dimensions);
  };
  const auto check_optional = [&check](const TensorArgument& argument, Element element,
                                       std::initializer_list<Dimension> dimensions) {
    if (argument.given) check(argument, element, dimensions);
  };
  Dimension E{"E"}, K{"K"};
  if (call.routed) {
    check_optional(call.router_x, static_cast<Element>(call.x.element), {T, D});
    check(call.gate_weight, f32, {E, D});
    E.size = call.gate_weight.sizes[0];
    K.size = call.num_activated_experts;
    check_optional(call.gate_bias, f32, {E});
    check_optional(call.expert_bias, f32, {E});
  } else {
    check(call.topk_ids, Element::int64, {T, K});
    K.size = call.topk_ids.sizes[1];
    check(call.topk_weights, f32, {T, K});
  }
  check(call.packed_w13, Element::uint8, {E, {"bytes"}});
  E.size = call.packed_w13.sizes[0];
  check(call.packed_w2, Element::uint8, {E, {"bytes"}});
  check_optional(call.bias13, f32, {E, {"rows of w13"}});
  check_optional(call.bias2, f32, {E, D});
  call.shape = {T.size, D.size, call.hidden_dim, E.size, K.size};
  return status;
}

// All that can be refused without looking into the tensors.
inline Status check(Call& call) {
  if (Status status = check_tensors(call); !status.ok()) return status;
  Shape shape = call.shape;
  if (shape.T == kAny) shape.T = 0;
  if (call.routed) {
    if (Status status = check_routing(shape, call.routing); !status.ok()) return status;
  }
  const ExpertSizes sizes{call.packed_w13.sizes[0], call.packed_w13.sizes[1],   call.packed_w2.sizes[0],
                          call.packed_w2.sizes[1],  element_count(call.bias13), element_count(call.bias2)};
  return check_experts(shape, call.experts, sizes);
}

// The output that a caller brings.
inline Status check_out(const Call& call, const TensorArgument& out) {
  return expect(out, {static_cast<Element>(call.x.element)}, {{"T", call.shape.T}, {"D", call.shape.D}});
}

inline std::size_t workspace_bytes(const Call& call, int threads) {
  return call.routed ? ffn_workspace_bytes(call.shape, call.experts, threads)
                     : experts_workspace_bytes(call.shape, call.experts, threads);
}

inline DType dtype_of(const TensorArgument& argument) {
  switch (static_cast<Element>(argument.element)) {
    case Element::bfloat16:
      return DType::bf16;
    case Element::float16:
      return DType::f16;
    default:
      return DType::f32;
  }
}

inline Status run(const Call& call, void* out, void* workspace, const ParallelFor& parallel) {
  const auto floats = [](const TensorArgument& argument) { return static_cast<const float*>(argument.data); };
  const ExpertTensors experts{static_cast<const std::uint8_t*>(call.packed_w13.data),
                              static_cast<const std::uint8_t*>(call.packed_w2.data),
                              call.packed_w13.sizes[1],
                              call.packed_w2.sizes[1],
                              floats(call.bias13),
                              floats(call.bias2)};
  const DType dtype = dtype_of(call.x);
  if (!call.routed)
    return quantized_experts(call.shape, call.experts, experts, call.x.data, dtype,
                             static_cast<const std::int64_t*>(call.topk_ids.data), floats(call.topk_weights), out,
                             workspace, parallel);
  const RouterTensors router{call.router_x.data, floats(call.gate_weight), floats(call.gate_bias),
                             floats(call.expert_bias)};
  return quantized_moe_ffn(call.shape, call.routing, router, call.experts, experts, call.x.data, dtype, out, workspace,
                           parallel);
}

}  // namespace moepack::ops
