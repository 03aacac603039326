// Carves arrays out of one block of the caller's memory. With a null base it only counts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moepack {

class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::uint8_t*>(base)) {}

  // 64-byte aligned relative to the base.
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }

  std::size_t used() const { return used_; }

 private:
  std::uint8_t* base_;
  std::size_t used_ = 0;
};

}  // namespace moepack
