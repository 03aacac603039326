// Decisions made from bytes, which are what a fuzzer mutates. Zeros, and all that follows the last byte, stand for the
// ordinary choice: an input is a few departures from a valid call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <random>

namespace moepack::fuzz {

class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  std::uint64_t bits(int bytes) {
    std::uint64_t value = 0;
    for (int i = 0; i < bytes && left_ > 0; ++i, --left_) value |= static_cast<std::uint64_t>(*data_++) << 8 * i;
    return value;
  }

  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(bits(n > 256 ? 4 : 1) % static_cast<std::uint64_t>(n));
  }
  bool one_in(int n) { return below(n) == n - 1; }

  // The first is the ordinary one.
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }

  // Numbers at which arithmetic goes wrong, or any other.
  std::int64_t integer() {
    const std::int64_t base = pick<std::int64_t>({0, 1, 64, 4096, INT32_MAX, INT64_C(1) << 32, INT64_MAX, INT64_MIN,
                                                  INT32_MIN, INT64_C(1) << 29, -1, INT32_MAX / 4});
    if (one_in(4)) return static_cast<std::int64_t>(bits(8));
    const auto near = static_cast<std::uint64_t>(below(5)) - static_cast<std::uint64_t>(below(3));
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(base) + near);
  }

  double number() {
    if (!one_in(4))
      return pick({0.0, 1.0, -1.0, 1e-45, 1e-40, -0.0, 3.5e38, 1e300, -1e300, 7.0, 1e-300,
                   std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                   std::numeric_limits<double>::quiet_NaN()});
    const std::uint64_t pattern = bits(8);
    double value;
    std::memcpy(&value, &pattern, sizeof value);
    return value;
  }

  // A source of bulk content: inputs stay short.
  std::mt19937 stream() { return std::mt19937(static_cast<std::uint32_t>(bits(4))); }

  bool exhausted() const { return left_ == 0; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

}  // namespace moepack::fuzz
