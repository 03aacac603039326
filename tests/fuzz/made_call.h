// A call of an operator as a binding reads it: valid, then departed from. Every tensor lies in memory of exactly its
// size.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "blobs.h"
#include "choices.h"
#include "matrix.h"
#include "memory.h"

namespace moepack::fuzz {

using ops::Element;
using ops::TensorArgument;

inline std::int64_t element_size(int element) {
  constexpr std::int64_t sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 1, 1, 4, 2};
  return element >= 0 && element < ops::kElementCount ? sizes[element] : 1;
}

// Sizes and attributes that fit each other.
struct Plan {
  bool routed;
  Shape shape;
  const Scheme* scheme;
  std::string_view layout, activation;
  Element x;

  bool departed = false;

  bool gated() const { return activation.substr(0, 4) != "relu"; }
  ExpertAttributes attributes() const {
    ExpertAttributes a;
    a.scheme = scheme->name;
    a.layout = layout;
    a.activation = activation;
    return a;
  }
};

inline Plan make_plan(Choices& choices) {
  Plan plan{};
  plan.routed = choices.one_in(2);
  plan.scheme = &scheme(choices);
  const bool is_integer = plan.scheme->cell == Cell::int4 || plan.scheme->cell == Cell::int8;
  plan.layout = is_integer && choices.one_in(3) ? "torchao" : "moepack";
  plan.activation = choices.pick<std::string_view>({"silu", "gelu_tanh", "swiglu_oai", "relu", "relu2"});
  plan.x = choices.pick({Element::float32, Element::bfloat16, Element::float16});
  Shape& s = plan.shape;
  const bool many_tokens = choices.one_in(32);  // more than one chunk of pairs
  s.D = 1 + choices.below(many_tokens ? 20 : 200);
  s.F = 1 + choices.below(many_tokens ? 20 : 200);
  if (plan.layout == "torchao") {  // has no incomplete groups
    s.D = plan.scheme->group * (1 + s.D % 2);
    s.F = plan.scheme->group * (1 + s.F % 2);
  }
  s.E = 1 + choices.below(6);
  s.K = 1 + choices.below(plan.routed ? s.E : 4);
  s.T = many_tokens ? 4097 / s.K + choices.below(40) : choices.below(6);
  // Without tokens, tensors of any size are there.
  plan.departed = s.T == 0 && !plan.routed && choices.one_in(4);
  if (plan.departed) s.K = std::max<std::int64_t>(0, choices.integer());
  return plan;
}

// The arguments in the order of the schema, each now and then another one.
class MadeStack {
 public:
  MadeStack(Choices& choices, const Plan& plan, int odds) : choices_(choices), plan_(plan), odds_(odds) {
    const Shape& s = plan.shape;
    if (plan.routed) integers_ = {s.K};
    integers_.push_back(s.F);
    texts_ = {plan.scheme->name, plan.layout};
    const double alpha = plan.activation == "swiglu_oai" ? 1.702 : 1.0;
    const double limit = plan.gated() ? choices.pick({0.0, 7.0}) : 0.0;
    if (plan.routed) {
      texts_.push_back(choices.pick<std::string_view>({"softmax", "softmax_all", "sigmoid"}));
      numbers_ = {choices.pick({0.0, 1e-20}), choices.pick({1.0, 2.5})};
      flags_ = {choices.one_in(2), choices.one_in(2)};
      integers_.insert(integers_.end(), {1, 1});
      texts_.push_back(choices.pick<std::string_view>({"top2sum", "max"}));
      texts_.push_back(choices.pick<std::string_view>({"float32", "bfloat16", "float16"}));
    }
    texts_.push_back(plan.activation);
    numbers_.insert(numbers_.end(), {alpha, limit, 0.0, 0.0});
    flags_.insert(flags_.end(), {limit > 0.0 && choices.one_in(4), choices.one_in(4)});
    has_bias13_ = !flags_.back() && choices.one_in(2);
  }

  TensorArgument tensor(const char* name) { return make(name, ordinary(name)); }
  TensorArgument optional_tensor(const char* name) {
    bool given = choices_.one_in(2);
    if (std::string_view(name) == "bias13") given = has_bias13_;
    if (departs()) given = !given;
    return given ? make(name, ordinary(name)) : TensorArgument{name};
  }
  std::int64_t integer() {
    return next(integers_, [this] { return choices_.integer(); });
  }
  double number() {
    return next(numbers_, [this] { return choices_.number(); });
  }
  bool flag() {
    return next(flags_, [this] { return choices_.one_in(2); });
  }
  std::string_view text() {
    return next(texts_, [this] { return another_text(); });
  }

  bool departed() const { return departed_; }
  // Memory for a tensor that a check accepted, but that is larger than what is tried here.
  bool oversized() const { return oversized_; }

 private:
  struct Description {
    Element element;
    std::vector<std::int64_t> sizes;
  };

  Description ordinary(std::string_view name) const {
    const Shape& s = plan_.shape;
    const Matrix w13 = Matrix::w13(s, plan_.attributes()), w2 = Matrix::w2(s, plan_.attributes());
    const std::map<std::string_view, Description> all = {
        {"x", {plan_.x, {s.T, s.D}}},
        {"router_x", {plan_.x, {s.T, s.D}}},
        {"gate_weight", {Element::float32, {s.E, s.D}}},
        {"gate_bias", {Element::float32, {s.E}}},
        {"expert_bias", {Element::float32, {s.E}}},
        {"topk_ids", {Element::int64, {s.T, s.K}}},
        {"topk_weights", {Element::float32, {s.T, s.K}}},
        {"packed_w13", {Element::uint8, {s.E, w13.bytes()}}},
        {"packed_w2", {Element::uint8, {s.E, w2.bytes()}}},
        {"bias13", {Element::float32, {s.E, w13.rows()}}},
        {"bias2", {Element::float32, {s.E, s.D}}},
    };
    return all.at(name);
  }

  bool departs() {
    const bool departs = choices_.one_in(odds_);
    departed_ = departed_ || departs;
    return departs;
  }

  template <class T, class Other>
  T next(std::deque<T>& values, Other other) {
    T value = values.front();
    values.pop_front();
    return departs() ? other() : value;
  }

  std::string_view another_text() {
    const std::string_view known = choices_.pick<std::string_view>(
        {"", "moepack", "torchao", "silu", "relu2", "swiglu_oai", "sigmoid", "max", "float16", "%s%n"});
    if (!choices_.one_in(2)) return known;
    const auto length = static_cast<std::size_t>(choices_.below(2000));
    Memory text(std::max<std::size_t>(length, 1), 16);
    for (std::size_t i = 0; i < length; ++i) text.data()[i] = static_cast<std::uint8_t>(choices_.bits(1));
    memories_.push_back(std::move(text));  // no zero behind its end
    return {reinterpret_cast<const char*>(memories_.back().data()), length};
  }

  // Another size of at least 0: without tokens, one may be the largest number already.
  static std::int64_t moved(std::int64_t size, std::int64_t by) {
    return __builtin_add_overflow(size, by, &size) ? INT64_MAX : std::max<std::int64_t>(0, size);
  }

  TensorArgument make(const char* name, Description description) {
    if (departs()) {
      if (choices_.one_in(3)) description.element = static_cast<Element>(choices_.below(30) - 2);
      if (choices_.one_in(3)) description.sizes.resize(static_cast<std::size_t>(choices_.below(6)), 1);
      for (auto& size : description.sizes)
        if (choices_.one_in(2)) size = moved(size, choices_.integer() % INT32_MAX);
    }
    TensorArgument argument{name, true};
    argument.element = static_cast<int>(description.element);
    argument.rank = static_cast<int>(description.sizes.size());
    std::int64_t bytes = element_size(argument.element);
    for (const std::int64_t size : description.sizes)
      if (__builtin_mul_overflow(bytes, size, &bytes)) bytes = INT64_MAX;
    for (int i = 0; i < std::min(argument.rank, TensorArgument::kMaxRank); ++i)
      argument.sizes[i] = description.sizes[i];
    constexpr std::int64_t most = 1 << 20;
    oversized_ = oversized_ || bytes > most;
    fill(argument, std::min(bytes, most));
    return argument;
  }

  void fill(TensorArgument& argument, std::int64_t bytes) {
    const bool packed = std::string_view(argument.name).substr(0, 6) == "packed";
    const auto shift = static_cast<std::size_t>(packed ? choices_.below(16) : 0);
    memories_.emplace_back(static_cast<std::size_t>(bytes), 16, shift);
    std::uint8_t* data = memories_.back().data();
    argument.data = data;
    std::mt19937 random = choices_.stream();
    const Shape& s = plan_.shape;
    if (packed) {
      fill_blobs(argument, data, bytes, random);
    } else if (argument.element == static_cast<int>(Element::int64)) {
      for (std::int64_t i = 0; i + 8 <= bytes; i += 8) {
        const std::int64_t id = bytes < 4096 && departs() ? choices_.integer() : random() % s.E;
        std::memcpy(data + i, &id, sizeof id);
      }
    } else {
      const bool wild = choices_.one_in(8);
      for (std::int64_t i = 0; i < bytes; ++i) data[i] = static_cast<std::uint8_t>(random());
      if (!wild) tame(argument, data, bytes);
    }
  }

  // Random bits become numbers of about 1.
  static void tame(const TensorArgument& argument, std::uint8_t* data, std::int64_t bytes) {
    const auto size = element_size(argument.element);
    for (std::int64_t i = size - 1; i < bytes; i += size) {
      data[i] = static_cast<std::uint8_t>((data[i] & 0x80) | (argument.element == 5 ? 0x38 : 0x3e) | (data[i] & 1));
    }
  }

  void fill_blobs(const TensorArgument& argument, std::uint8_t* data, std::int64_t bytes, std::mt19937& random) {
    const bool first = std::string_view(argument.name) == "packed_w13";
    const std::vector<std::uint8_t> blob = valid(first, random);
    const auto size = static_cast<std::int64_t>(blob.size());
    for (std::int64_t begin = 0; begin < bytes; begin += size) {
      std::memcpy(data + begin, blob.data(), static_cast<std::size_t>(std::min(size, bytes - begin)));
      if (begin + size > bytes) break;
      if (departs()) damage_header(choices_, data + begin);
      if (choices_.one_in(4)) damage_payload(choices_, data + begin, size);
    }
  }

  std::vector<std::uint8_t> valid(bool first, std::mt19937& random) const {
    const Shape& s = plan_.shape;
    const Scheme& scheme = *plan_.scheme;
    const ExpertAttributes a = plan_.attributes();
    if (plan_.layout == "torchao")
      return valid_universal_blob(scheme, (first ? Matrix::w13(s, a) : Matrix::w2(s, a)).bytes(), random);
    if (!first) return valid_blob(scheme, s.D, s.F, RowOrder::plain, random);
    return plan_.gated() ? valid_blob(scheme, 2 * s.F, s.D, RowOrder::gate_up, random)
                         : valid_blob(scheme, s.F, s.D, RowOrder::plain, random);
  }

  Choices& choices_;
  const Plan& plan_;
  const int odds_;
  std::deque<std::int64_t> integers_;
  std::deque<double> numbers_;
  std::deque<bool> flags_;
  std::deque<std::string_view> texts_;
  bool has_bias13_ = false, departed_ = plan_.departed, oversized_ = false;
  std::deque<Memory> memories_;
};

}  // namespace moepack::fuzz
