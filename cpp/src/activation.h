// The op's activations: one row of a table each.
#pragma once

#include "gemm/kernel.h"
#include "moepack/ffn.h"

namespace moepack {

// Refuses names and numbers that do not go together.
Status check_activation(const ExpertAttributes& attributes);

// The attributes have passed check_activation.
gemm::Activation activation_of(const ExpertAttributes& attributes);

}  // namespace moepack
