#include "moepack/parallel.h"

namespace moepack {

ParallelFor serial() {
  return {1,
          [](void*, int count, void (*body)(void*, int), void* argument) {
            for (int i = 0; i < count; ++i) body(argument, i);
          },
          nullptr};
}

}  // namespace moepack
