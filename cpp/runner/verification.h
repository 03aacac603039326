// Packed weights carry checksums, which the kernels do not compute: damaged payload changes numbers, nothing else. Here
// every expert's checksum is compared before its first use, whatever file the weights came from.
#pragma once

#include <executorch/runtime/kernel/operator_registry.h>

#include <cstddef>
#include <vector>

namespace runner {

// All registered kernels, to load a method with: moepack's check the packed tensors that a program hands them, all
// experts of each, once. A wrong checksum is an error of the call, in the runtime's log.
std::vector<executorch::runtime::Kernel> verifying_kernels();

// How many experts' matrices have been found undamaged.
std::size_t verified_matrices();

}  // namespace runner
