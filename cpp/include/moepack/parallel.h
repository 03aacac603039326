// The host's thread pool, as the core sees it.
#pragma once

namespace moepack {

struct ParallelFor {
  int threads = 1;  // how many workers may run at once
  // Calls body(argument, i) once for each i in [0, count), in any order, on any threads, and waits for all.
  void (*run)(void* pool, int count, void (*body)(void* argument, int i), void* argument) = nullptr;
  void* pool = nullptr;
};

// One worker, the calling thread.
ParallelFor serial();

}  // namespace moepack
