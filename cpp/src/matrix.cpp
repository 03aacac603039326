#include "matrix.h"

#include <cmath>
#include <cstring>

#include "activation.h"
#include "universal.h"

namespace moepack {
namespace {

constexpr std::string_view kUniversal = "torchao";

gemm::PanelKind panel_kind(Cell cell) {
  using gemm::PanelKind;
  switch (cell) {
    case Cell::int4:
      return PanelKind::int4;
    case Cell::int8:
      return PanelKind::int8;
    case Cell::mxfp4:
      return PanelKind::mxfp4;
    case Cell::fp8:
      return PanelKind::fp8;
  }
  return PanelKind::count;
}

// What the tiles take for a code's value, as a power of two times the value.
int value_exponent(Cell cell) { return cell == Cell::mxfp4 ? 1 : cell == Cell::fp8 ? -8 : 0; }

}  // namespace

const char* layout_names() { return "moepack, torchao"; }
bool is_layout(std::string_view name) { return name == "moepack" || name == kUniversal; }

Matrix Matrix::w13(const Shape& shape, const ExpertAttributes& attributes) {
  const bool gated = activation_of(attributes).gated;
  return {attributes, gated ? 2 * shape.F : shape.F, shape.D, gated ? RowOrder::gate_up : RowOrder::plain};
}

Matrix Matrix::w2(const Shape& shape, const ExpertAttributes& attributes) {
  return {attributes, shape.D, shape.F, RowOrder::plain};
}

Matrix::Matrix(const ExpertAttributes& attributes, std::int64_t rows, std::int64_t cols, RowOrder order)
    : scheme_(*find_scheme(attributes.scheme)),
      rows_(rows),
      cols_(cols),
      order_(order),
      universal_(attributes.layout == kUniversal) {}

Status Matrix::check_dimensions() const {
  if (!universal_) return {};
  return universal::check_dimensions(scheme_, order_ == RowOrder::gate_up ? rows_ / 2 : rows_, cols_);
}

std::int64_t Matrix::bytes() const {
  return universal_ ? universal::blob_bytes(scheme_, rows_, cols_) : packed_bytes(scheme_, rows_, cols_, order_);
}

Status Matrix::check(const std::uint8_t* blob, std::int64_t bytes) const {
  return universal_ ? universal::check_header(blob, bytes, scheme_, rows_, cols_)
                    : check_header(blob, bytes, scheme_, rows_, cols_, order_);
}

gemm::Panel Matrix::panel(const std::uint8_t* blob, std::int64_t index, bool up) const {
  if (universal_) return universal::panel(scheme_, blob, (up ? rows_ / 2 / kPanelColumns : 0) + index, cols_);
  PackedHeader header;
  std::memcpy(&header, blob, sizeof header);
  const std::int64_t place = order_ == RowOrder::gate_up ? 2 * index + up : index;
  return {blob + sizeof header + place * panel_bytes(scheme_, cols_), static_cast<int>(groups()), scheme_.group,
          std::ldexp(1.0f, header.scale_exponent - value_exponent(scheme_.cell))};
}

gemm::Kernel::Gemm Matrix::gemm(const gemm::Kernel& kernel) const {
  using gemm::PanelKind;
  const PanelKind kind = universal_
                             ? (scheme_.cell == Cell::int4 ? PanelKind::int4_universal : PanelKind::int8_universal)
                             : panel_kind(scheme_.cell);
  return kernel.gemm[static_cast<int>(kind)];
}

}  // namespace moepack
