// A pool that starts its threads anew in every call.
#pragma once

#include <thread>
#include <vector>

#include "moepack/parallel.h"

namespace moepack::made {

inline ParallelFor threads(int n) {
  if (n == 1) return serial();
  return {n,
          [](void*, int count, void (*body)(void*, int), void* argument) {
            std::vector<std::thread> others;
            for (int i = 1; i < count; ++i) others.emplace_back(body, argument, i);
            body(argument, 0);
            for (std::thread& other : others) other.join();
          },
          nullptr};
}

}  // namespace moepack::made
