#include "universal.h"

#include <cstring>

#include "moepack/packed.h"

namespace moepack::universal {
namespace {

constexpr std::int64_t kRows = 8;         // of a panel
constexpr std::int64_t kScaleAndSum = 8;  // bytes per row and group
constexpr std::int32_t kHeader[] = {6712, 1, 0, 0, 0, 8, 16, 2, 0, 0, 0, 0, 0, 0, 0, 0};
constexpr std::int64_t kHeaderBytes = sizeof kHeader;
constexpr int kBitsAt = 2;  // the field of the header that holds the bits of a code

int bits(const Scheme& scheme) { return cell_info(scheme.cell).bits; }

// Bytes of one row of a panel.
std::int64_t row_bytes(const Scheme& scheme, std::int64_t cols) {
  return cols / scheme.group * (scheme.group * bits(scheme) / 8 + kScaleAndSum);
}

}  // namespace

Status check_dimensions(const Scheme& scheme, std::int64_t rows, std::int64_t cols) {
  if (cell_info(scheme.cell).scale != ScaleType::fp16)
    return Status::error("scheme %.*s is not supported in the layout 'torchao'; supported: int4 and int8",
                         static_cast<int>(scheme.name.size()), scheme.name.data());
  if (cols % scheme.group == 0 && rows % kPanelColumns == 0) return {};
  return Status::error(
      "a matrix of %lld x %lld in groups of %d: the layout 'torchao' needs columns in whole groups and rows in "
      "multiples of %d; pack it in the layout 'moepack'",
      static_cast<long long>(rows), static_cast<long long>(cols), scheme.group, kPanelColumns);
}

std::int64_t blob_bytes(const Scheme& scheme, std::int64_t rows, std::int64_t cols) {
  return kHeaderBytes + round_up(rows, kRows) * row_bytes(scheme, cols);
}

Status check_header(const std::uint8_t* blob, std::int64_t bytes, const Scheme& scheme, std::int64_t rows,
                    std::int64_t cols) {
  if (bytes != blob_bytes(scheme, rows, cols))
    return Status::error("the blob has %lld bytes; torchao's layout of %lld x %lld, %d bits, group %d makes %lld",
                         static_cast<long long>(bytes), static_cast<long long>(rows), static_cast<long long>(cols),
                         bits(scheme), scheme.group, static_cast<long long>(blob_bytes(scheme, rows, cols)));
  std::int32_t expected[16], found[16];
  std::memcpy(expected, kHeader, sizeof expected);
  expected[kBitsAt] = bits(scheme);
  std::memcpy(found, blob, sizeof found);
  if (found[0] != expected[0]) return Status::error("not a universal blob of torchao: it begins with %d", found[0]);
  for (int i = 1; i < 16; ++i)
    if (found[i] != expected[i])
      return Status::error("field %d of the universal blob's header is %d; supported for %d-bit codes: %d", i, found[i],
                           bits(scheme), expected[i]);
  return {};
}

gemm::Panel panel(const Scheme& scheme, const std::uint8_t* blob, std::int64_t index, std::int64_t cols) {
  return {blob + kHeaderBytes + index * kPanelColumns * row_bytes(scheme, cols), static_cast<int>(cols / scheme.group),
          scheme.group, 1.0f};
}

}  // namespace moepack::universal
