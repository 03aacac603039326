// The op's activations: one row of a table each.
#pragma once

#include "gemm/kernel.h"
#include "moepack/ffn.h"
#include "moepack/packed.h"

namespace moepack {

// Refuses names and numbers that do not go together.
Status check_activation(const ExpertAttributes& attributes);

// The attributes have passed check_activation.
gemm::Activation activation_of(const ExpertAttributes& attributes);

// The matrix that holds w13: rows [gate; up], or only the up rows of experts without a gate.
struct Matrix13 {
  std::int64_t rows;
  RowOrder order;
};
Matrix13 matrix13(std::int64_t hidden_dim, bool gated);

}  // namespace moepack
