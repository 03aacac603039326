// What every target offers, libFuzzer's interface, and how it says that a promise was broken.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace moepack::fuzz {

// How far the inputs came. A target whose inputs are all refused tests nothing: the driver fails then.
struct Reached {
  std::int64_t refused = 0;   // an error, as promised
  std::int64_t accepted = 0;  // computed, and found right
};
inline Reached reached;

#define MOEPACK_PROMISE(condition)                                                         \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      std::fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)

}  // namespace moepack::fuzz
