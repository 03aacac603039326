// torchao's "universal" blobs, the weights of ExecuTorch's own llama::quantized_moe_ffn, as the layout "torchao".
//
// A 64-byte header, then panels of 8 rows; a panel holds, for each group along K, its codes, 8 fp32 scales and 8 int32
// sums of codes (gemm/universal.h). Neither the shape nor the group is written down; K is a multiple of the group.
#pragma once

#include <cstdint>

#include "gemm/kernel.h"
#include "moepack/scheme.h"
#include "moepack/status.h"

namespace moepack::universal {

Status check_dimensions(const Scheme& scheme, std::int64_t rows, std::int64_t cols);
std::int64_t blob_bytes(const Scheme& scheme, std::int64_t rows, std::int64_t cols);
Status check_header(const std::uint8_t* blob, std::int64_t bytes, const Scheme& scheme, std::int64_t rows,
                    std::int64_t cols);

// Rows 16 * index .. as a panel of kind int4_universal or int8_universal.
gemm::Panel panel(const Scheme& scheme, const std::uint8_t* blob, std::int64_t index, std::int64_t cols);

}  // namespace moepack::universal
