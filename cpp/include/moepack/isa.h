// Which instruction sets exist, which this CPU runs, and which one is used.
#pragma once

#include "moepack/status.h"

namespace moepack {

struct IsaInfo {
  const char* name;        // "scalar", "avx2", ...
  bool supported;          // by this CPU and operating system
  bool chosen_by_default;  // false: needs MOEPACK_ISA
};

int isa_count();
IsaInfo isa_info(int i);  // best first

// The name of the one in use. Decided once: MOEPACK_ISA if set, else the best supported one. An unknown or unsupported
// MOEPACK_ISA is an error, returned by every call of the ops.
Status active_isa(const char*& name);

// Overrides the choice for this process; nullptr goes back to the default. For tests and benchmarks.
Status force_isa(const char* name);

}  // namespace moepack
