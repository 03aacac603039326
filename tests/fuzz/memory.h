// Heap memory of exactly the promised size: AddressSanitizer sees every access beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace moepack::fuzz {

class Memory {
 public:
  // `shift` bytes are left out at the front, so that the rest lies at any address.
  explicit Memory(std::size_t bytes, std::size_t alignment = 16, std::size_t shift = 0) : bytes_(bytes), shift_(shift) {
    if (posix_memalign(&begin_, alignment, bytes + shift) != 0) std::abort();
    std::memset(begin_, 0xa5, bytes + shift);
  }
  ~Memory() { std::free(begin_); }
  Memory(Memory&& other) noexcept : bytes_(other.bytes_), shift_(other.shift_), begin_(other.begin_) {
    other.begin_ = nullptr;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory& operator=(Memory&&) = delete;

  std::uint8_t* data() { return static_cast<std::uint8_t*>(begin_) + shift_; }
  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(begin_) + shift_; }
  std::size_t size() const { return bytes_; }

 private:
  std::size_t bytes_, shift_;
  void* begin_ = nullptr;
};

}  // namespace moepack::fuzz
