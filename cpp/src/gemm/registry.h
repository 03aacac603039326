#pragma once

#include "gemm/kernel.h"
#include "moepack/status.h"

namespace moepack::gemm {

// The kernel in use: MOEPACK_ISA or force_isa, else the best that this CPU runs and that is chosen by default.
Status active_kernel(const Kernel*& kernel);

}  // namespace moepack::gemm
