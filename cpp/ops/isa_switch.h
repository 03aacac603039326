// Each library that is linked with the core holds its own choice of instruction set; this is how Python reaches it.
// Included once by each library of operators.
#pragma once

#include "moepack/isa.h"
#include "moepack/status.h"

// Returns nullptr, or why not. `name` as for moepack::force_isa.
extern "C" [[gnu::visibility("default")]] const char* moepack_force_isa(const char* name) {
  static thread_local moepack::Status status;
  status = moepack::force_isa(name);
  return status.ok() ? nullptr : status.message();
}
