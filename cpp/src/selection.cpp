#include "selection.h"

#include <algorithm>
#include <cmath>

#include "half.h"

namespace moepack {
namespace {

// Integers that order like floats, with -0 = +0 and NaN below -inf; one more below that for what is out of the race.
constexpr std::int32_t kOut = INT32_MIN;
constexpr std::int32_t kNaN = INT32_MIN + 1;

std::int32_t key_of(float choice) {
  if (choice != choice) return kNaN;
  const std::int32_t bits = static_cast<std::int32_t>(bits_of(choice + 0.0f));
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

float largest(const float* values, std::int64_t n) {
  float m = -INFINITY;
  bool any = false;
  for (std::int64_t i = 0; i < n; ++i)
    if (values[i] == values[i]) {
      any = true;
      m = std::max(m, values[i]);
    }
  return any ? m : 0.0f;
}

float sequential_sum(const float* values, std::int64_t n) {
  float sum = 0.0f;
  for (std::int64_t i = 0; i < n; ++i) sum += values[i];
  return sum;
}

// The first of the largest keys.
std::int64_t best(const std::int32_t* keys, std::int64_t n) { return std::max_element(keys, keys + n) - keys; }

Selection::Score score_named(std::string_view name) {
  if (name == "sigmoid") return Selection::Score::sigmoid;
  return name == "softmax_all" ? Selection::Score::softmax_all : Selection::Score::softmax;
}

}  // namespace

Selection::Selection(const Shape& shape, const RoutingAttributes& attributes, const float* expert_bias,
                     const gemm::Kernel& kernel)
    : kernel_(kernel),
      expert_bias_(expert_bias),
      experts_(shape.E),
      top_k_(shape.K),
      groups_(attributes.n_group),
      kept_groups_(attributes.topk_group),
      score_(score_named(attributes.score_func)),
      top2sum_(attributes.group_score == "top2sum"),
      norm_(attributes.norm_topk),
      norm_clamp_(attributes.norm_clamp),
      norm_eps_(static_cast<float>(attributes.norm_eps)),
      route_scale_(static_cast<float>(attributes.route_scale)) {}

void Selection::operator()(float* logits, std::int32_t* keys, std::int64_t* ids, float* weights) const {
  score(logits);
  for (std::int64_t e = 0; e < experts_; ++e) keys[e] = key_of(expert_bias_ ? logits[e] + expert_bias_[e] : logits[e]);
  if (groups_ > 1) keep_best_groups(logits, keys);
  for (std::int64_t slot = 0; slot < top_k_; ++slot) {
    ids[slot] = best(keys, experts_);
    keys[ids[slot]] = kOut;
  }
  weigh(logits, ids, weights);
}

void Selection::score(float* logits) const {
  const int n = static_cast<int>(experts_);
  if (score_ == Score::sigmoid) kernel_.sigmoid(logits, n);
  if (score_ != Score::softmax_all) return;
  kernel_.exp_minus(logits, n, largest(logits, experts_));
  const float sum = sequential_sum(logits, experts_);
  for (std::int64_t e = 0; e < experts_; ++e) logits[e] = logits[e] / sum;
}

void Selection::keep_best_groups(const float* scores, std::int32_t* keys) const {
  const std::int64_t size = experts_ / groups_;
  std::int32_t* group_keys = keys + experts_;
  const auto choice = [&](std::int64_t e) { return expert_bias_ ? scores[e] + expert_bias_[e] : scores[e]; };
  for (std::int64_t group = 0; group < groups_; ++group) {
    std::int32_t* members = keys + group * size;
    const std::int64_t first = best(members, size);
    group_keys[group] = members[first];
    if (!top2sum_) continue;
    members[first] = kOut;
    const std::int64_t second = best(members, size);
    members[first] = group_keys[group];
    group_keys[group] = key_of(choice(group * size + first) + choice(group * size + second));
  }
  for (std::int64_t kept = 0; kept < kept_groups_; ++kept) group_keys[best(group_keys, groups_)] = kOut;
  for (std::int64_t group = 0; group < groups_; ++group)
    if (group_keys[group] != kOut) std::fill_n(keys + group * size, size, kOut);
}

void Selection::weigh(const float* scores, const std::int64_t* ids, float* weights) const {
  for (std::int64_t slot = 0; slot < top_k_; ++slot) weights[slot] = scores[ids[slot]];
  if (score_ == Score::softmax) {
    kernel_.exp_minus(weights, static_cast<int>(top_k_), largest(weights, top_k_));
    const float sum = sequential_sum(weights, top_k_);
    for (std::int64_t slot = 0; slot < top_k_; ++slot) weights[slot] = weights[slot] / sum;
  }
  if (norm_) {
    const float sum = sequential_sum(weights, top_k_);
    const float divisor = norm_clamp_ ? (sum < norm_eps_ ? norm_eps_ : sum) : sum + norm_eps_;
    for (std::int64_t slot = 0; slot < top_k_; ++slot) weights[slot] = weights[slot] / divisor;
  }
  for (std::int64_t slot = 0; slot < top_k_; ++slot) weights[slot] = weights[slot] * route_scale_;
}

}  // namespace moepack
