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

// Bytes of a decoded panel of 16 columns.
std::int64_t panel_bytes(const Scheme& scheme, std::int64_t cols);
// Rows 16 * index .. as a panel of kind int4_fp32 or int8_fp32.
void decode_panel(const gemm::Kernel& kernel, const Scheme& scheme, const std::uint8_t* blob, std::int64_t index,
                  std::int64_t cols, std::uint8_t* panel);

}  // namespace moepack::universal
