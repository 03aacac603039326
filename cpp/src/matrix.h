// One matrix of every expert, as its layout keeps it: how many bytes it takes, whether a blob is one, and its panels,
// read in place.
#pragma once

#include <cstdint>

#include "gemm/kernel.h"
#include "moepack/ffn.h"
#include "moepack/packed.h"

namespace moepack {

class Matrix {
 public:
  // w13: rows [gate; up], or only the up rows of experts without a gate. The attributes name a scheme and a layout.
  static Matrix w13(const Shape& shape, const ExpertAttributes& attributes);
  static Matrix w2(const Shape& shape, const ExpertAttributes& attributes);

  std::int64_t rows() const { return rows_; }
  // Refuses dimensions that the layout cannot hold.
  Status check_dimensions() const;
  std::int64_t bytes() const;
  // Refuses a blob of another format, scheme or shape.
  Status check(const std::uint8_t* blob, std::int64_t bytes) const;

  // The panel of rows 16 * index .. of gate, or of all rows without a gate; of up with `up`.
  gemm::Panel panel(const std::uint8_t* blob, std::int64_t index, bool up) const;
  gemm::Kernel::Gemm gemm(const gemm::Kernel& kernel) const;

 private:
  Matrix(const ExpertAttributes& attributes, std::int64_t rows, std::int64_t cols, RowOrder order);
  std::int64_t groups() const { return ceil_div(cols_, scheme_.group); }

  const Scheme& scheme_;
  std::int64_t rows_, cols_;
  RowOrder order_;
  bool universal_;
};

// "moepack, torchao": for error messages.
const char* layout_names();
bool is_layout(std::string_view name);

}  // namespace moepack
