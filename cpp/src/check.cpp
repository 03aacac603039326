// What the op supports: attributes, sizes, and how they fit each other. One place for Meta, eager and runtime.
#include <cfloat>
#include <cmath>

#include "activation.h"
#include "matrix.h"
#include "moepack/ffn.h"

namespace moepack {
namespace {

constexpr std::int64_t kMaxDim = INT32_MAX / 4;

Status unsupported(const char* what, std::string_view found, const char* supported) {
  return Status::error("%s '%.*s' is not supported; supported: %s", what, static_cast<int>(found.size()), found.data(),
                       supported);
}

Status check_shape(const Shape& s) {
  if (s.T < 0) return Status::error("%lld tokens", static_cast<long long>(s.T));
  if (s.D < 1 || s.F < 1 || s.E < 1 || s.D > kMaxDim || s.F > kMaxDim || s.E > kMaxDim)
    return Status::error("model width %lld, hidden_dim %lld and %lld experts have to be at least 1 and below 2^29",
                         static_cast<long long>(s.D), static_cast<long long>(s.F), static_cast<long long>(s.E));
  if (s.K < 1 || s.K > kMaxDim)
    return Status::error("%lld activated experts per token; at least 1 and fewer than 2^29 are supported",
                         static_cast<long long>(s.K));
  return {};
}

Status check_tensor(const char* name, std::int64_t experts, std::int64_t bytes, std::int64_t expected_experts,
                    std::int64_t expected_bytes) {
  if (experts != expected_experts)
    return Status::error("%s holds %lld experts, the other tensors %lld", name, static_cast<long long>(experts),
                         static_cast<long long>(expected_experts));
  if (bytes != expected_bytes)
    return Status::error("%s has %lld bytes per expert; this scheme and these dimensions need %lld", name,
                         static_cast<long long>(bytes), static_cast<long long>(expected_bytes));
  return {};
}

Status check_bias(const char* name, std::int64_t elements, std::int64_t expected) {
  if (elements >= 0 && elements != expected)
    return Status::error("%s has %lld elements, not %lld", name, static_cast<long long>(elements),
                         static_cast<long long>(expected));
  return {};
}

Status check_groups(const Shape& shape, const RoutingAttributes& r) {
  if (r.n_group < 1 || shape.E % r.n_group != 0)
    return Status::error("n_group %lld has to divide %lld experts", static_cast<long long>(r.n_group),
                         static_cast<long long>(shape.E));
  if (r.topk_group < 1 || r.topk_group > r.n_group)
    return Status::error("topk_group %lld is outside 1..n_group = %lld", static_cast<long long>(r.topk_group),
                         static_cast<long long>(r.n_group));
  const std::int64_t group_size = shape.E / r.n_group;
  if (r.n_group > 1 && r.group_score == "top2sum" && group_size < 2)
    return Status::error("group_score top2sum needs groups of at least 2 experts, not %lld in %lld groups",
                         static_cast<long long>(shape.E), static_cast<long long>(r.n_group));
  if (r.topk_group * group_size < shape.K)
    return Status::error("%lld groups of %lld experts are too few for %lld activated experts",
                         static_cast<long long>(r.topk_group), static_cast<long long>(group_size),
                         static_cast<long long>(shape.K));
  return {};
}

}  // namespace

Status check_experts(const Shape& shape, const ExpertAttributes& attributes, const ExpertSizes& sizes) {
  if (Status status = check_shape(shape); !status.ok()) return status;
  if (!find_scheme(attributes.scheme)) return unsupported("scheme", attributes.scheme, scheme_names());
  if (!is_layout(attributes.layout)) return unsupported("layout", attributes.layout, layout_names());
  if (Status status = check_activation(attributes); !status.ok()) return status;
  const Matrix w13 = Matrix::w13(shape, attributes), w2 = Matrix::w2(shape, attributes);
  if (Status status = w13.check_dimensions(); !status.ok()) return status;
  if (Status status = w2.check_dimensions(); !status.ok()) return status;
  if (Status status = check_tensor("packed_w13", sizes.experts13, sizes.bytes13, shape.E, w13.bytes()); !status.ok())
    return status;
  if (Status status = check_tensor("packed_w2", sizes.experts2, sizes.bytes2, shape.E, w2.bytes()); !status.ok())
    return status;
  if (Status status = check_bias("bias13", sizes.bias13, shape.E * w13.rows()); !status.ok()) return status;
  if (attributes.weight_on_input && sizes.bias13 >= 0)
    return Status::error("weight_on_input is not supported together with bias13; supported: one of them");
  return check_bias("bias2", sizes.bias2, shape.E * shape.D);
}

Status check_routing(const Shape& shape, const RoutingAttributes& r) {
  if (Status status = check_shape(shape); !status.ok()) return status;
  if (shape.K > shape.E)
    return Status::error("%lld activated experts of %lld", static_cast<long long>(shape.K),
                         static_cast<long long>(shape.E));
  if (r.score_func != "softmax" && r.score_func != "softmax_all" && r.score_func != "sigmoid")
    return unsupported("score_func", r.score_func, "softmax, softmax_all, sigmoid");
  if (r.group_score != "top2sum" && r.group_score != "max")
    return unsupported("group_score", r.group_score, "top2sum, max");
  if (r.router_dtype != "float32" && r.router_dtype != "bfloat16" && r.router_dtype != "float16")
    return unsupported("router_dtype", r.router_dtype, "float32, bfloat16, float16");
  // Both are used in fp32.
  if (!(r.norm_eps >= 0.0 && r.norm_eps <= FLT_MAX))
    return Status::error("norm_eps %g has to be 0 or more, and finite in fp32", r.norm_eps);
  if (!(std::fabs(r.route_scale) <= FLT_MAX))
    return Status::error("route_scale %g has to be finite in fp32", r.route_scale);
  return check_groups(shape, r);
}

}  // namespace moepack
