#include "activation.h"

#include <cmath>

namespace moepack {
namespace {

using Kind = gemm::Activation::Kind;

struct Row {
  std::string_view name;
  Kind kind;
  bool gated;
  bool alpha, limit, softcap;  // which numbers it takes
};

constexpr Row kActivations[] = {
    {"silu", Kind::silu, true, false, true, true},
    {"gelu_tanh", Kind::gelu_tanh, true, false, true, false},
    {"swiglu_oai", Kind::swiglu_oai, true, true, true, false},
    {"relu", Kind::relu, false, false, false, false},
    {"relu2", Kind::relu2, false, false, false, false},
};
constexpr const char* kNames = "silu, gelu_tanh, swiglu_oai, relu, relu2";

const Row* find(std::string_view name) {
  for (const Row& row : kActivations)
    if (row.name == name) return &row;
  return nullptr;
}

// A number that an activation takes has to be finite and not negative in fp32; one that it does not take, neutral.
Status check_number(const char* what, double value, double neutral, bool taken, std::string_view activation) {
  if (!taken && value != neutral)
    return Status::error("%s %g is not supported with activation '%.*s'; supported: %g (none)", what, value,
                         static_cast<int>(activation.size()), activation.data(), neutral);
  if (!std::isfinite(static_cast<float>(value)) || value < 0.0 || (value > 0.0 && static_cast<float>(value) == 0.0f))
    return Status::error("%s %g has to be 0 or more, and finite in fp32", what, value);
  return {};
}

}  // namespace

Status check_activation(const ExpertAttributes& a) {
  const Row* row = find(a.activation);
  if (!row)
    return Status::error("activation '%.*s' is not supported; supported: %s", static_cast<int>(a.activation.size()),
                         a.activation.data(), kNames);
  if (Status s = check_number("act_alpha", a.act_alpha, 1.0, row->alpha, a.activation); !s.ok()) return s;
  if (Status s = check_number("act_limit", a.act_limit, 0.0, row->limit, a.activation); !s.ok()) return s;
  if (Status s = check_number("gate_softcap", a.gate_softcap, 0.0, row->softcap, a.activation); !s.ok()) return s;
  if (Status s = check_number("up_softcap", a.up_softcap, 0.0, row->softcap, a.activation); !s.ok()) return s;
  if (a.limit_after_act && a.act_limit == 0.0) return Status::error("limit_after_act needs an act_limit above 0");
  return {};
}

gemm::Activation activation_of(const ExpertAttributes& a) {
  const Row& row = *find(a.activation);
  return {row.kind,
          row.gated,
          static_cast<float>(a.act_alpha),
          static_cast<float>(a.act_limit),
          a.limit_after_act,
          static_cast<float>(a.gate_softcap),
          static_cast<float>(a.up_softcap)};
}

}  // namespace moepack
