// moepack._core: what Python needs from the C++ core. Buffers are numpy arrays of the exact dtype; every size is
// checked here, so that no call from Python reaches out of bounds. Python's types and errors are made in
// moepack.packing, moepack.quantizer and moepack.ops.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "moepack/compare.h"
#include "moepack/decode.h"
#include "moepack/isa.h"
#include "moepack/limits.h"
#include "moepack/packed.h"
#include "moepack/quantize.h"
#include "moepack/scheme.h"

namespace py = pybind11;

namespace {

using moepack::RowOrder;
using moepack::Scheme;
using moepack::Status;

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Bytes = Array<std::uint8_t>;
using Codes = Array<std::int8_t>;
using Scales = py::array;  // contiguous, in the bytes of the cell's type
using Weights = Array<float>;

void require(const Status& status) {
  if (!status.ok()) throw py::value_error(status.message());
}

void require(bool fits, const char* message) {
  if (!fits) throw py::value_error(message);
}

const Scheme& scheme_named(const std::string& name) {
  const Scheme* scheme = moepack::find_scheme(name);
  if (!scheme) throw py::value_error("scheme " + name + " is not supported; supported: " + moepack::scheme_names());
  return *scheme;
}

RowOrder row_order(int number) {
  require(number == 0 || number == 1, "row order: 0 (plain) or 1 (gate_up)");
  return static_cast<RowOrder>(number);
}

using SchemeRow = std::tuple<std::string, std::string, int, std::string, int, int, int>;

const char* scale_name(moepack::ScaleType type) {
  return type == moepack::ScaleType::fp16 ? "fp16" : type == moepack::ScaleType::e8m0 ? "e8m0" : "fp32";
}

std::vector<SchemeRow> schemes() {
  std::vector<SchemeRow> rows;
  for (const Scheme* s = moepack::schemes_begin(); s != moepack::schemes_end(); ++s) {
    const moepack::CellInfo& cell = moepack::cell_info(s->cell);
    rows.emplace_back(std::string(s->name), cell.name, cell.bits, scale_name(cell.scale), s->group, s->code_min,
                      s->code_max);
  }
  return rows;
}

// A matrix [rows, cols] of codes with its scales [rows, ceil(cols / group)].
std::pair<std::int64_t, std::int64_t> matrix_shape(const Scheme& scheme, const py::array& codes,
                                                   const py::array& scales) {
  require(codes.ndim() == 2 && scales.ndim() == 2, "codes and scales: expected two dimensions");
  require(scales.shape(0) == codes.shape(0) && scales.shape(1) == moepack::ceil_div(codes.shape(1), scheme.group),
          "scales: expected [rows, ceil(cols / group)]");
  require(scales.itemsize() == moepack::cell_info(scheme.cell).scale_bytes && (scales.flags() & py::array::c_style),
          "scales: expected contiguous numbers of the scheme's scale type");
  return {codes.shape(0), codes.shape(1)};
}

std::int64_t packed_bytes(const std::string& name, std::int64_t rows, std::int64_t cols, int order) {
  require(rows > 0 && cols > 0, "packed_bytes: expected at least one row and one column");
  require(row_order(order) == RowOrder::plain || rows % 2 == 0, "row order gate_up: expected an even number of rows");
  return moepack::packed_bytes(scheme_named(name), rows, cols, row_order(order));
}

std::string code_range(const Scheme& scheme) {
  if (scheme.cell == moepack::Cell::int8) return "-128 .. 127";
  if (scheme.cell == moepack::Cell::fp8) return "bits of e4m3 numbers, no NaN";
  return std::to_string(scheme.code_min) + " .. " + std::to_string(scheme.code_max);
}

void pack(const std::string& name, int order, const Codes& codes, const Scales& scales, std::int32_t exponent,
          Bytes& blob) {
  const Scheme& scheme = scheme_named(name);
  const auto [rows, cols] = matrix_shape(scheme, codes, scales);
  require(blob.ndim() == 1 && blob.shape(0) == packed_bytes(name, rows, cols, order), "blob: wrong length");
  const moepack::ExponentRange range = moepack::exponent_range(scheme.cell);
  require(exponent >= range.min && exponent <= range.max, "scale exponent: out of the scheme's range");
  const std::int8_t* code = codes.data();
  const void* scale = scales.data();
  std::uint8_t* out = blob.mutable_data();
  bool in_range = true;
  {
    const py::gil_scoped_release release;
    in_range = moepack::are_codes(scheme, code, rows * cols);
    if (in_range) moepack::pack(scheme, row_order(order), rows, cols, code, scale, exponent, out);
  }
  if (!in_range) throw py::value_error("codes: expected " + code_range(scheme) + " for " + name);
}

moepack::PackedHeader header_of(const Bytes& blob) {
  require(blob.ndim() == 1, "blob: expected one dimension");
  moepack::PackedHeader header;
  require(moepack::read_header(blob.data(), blob.size(), header));
  return header;
}

const Scheme& scheme_of(const moepack::PackedHeader& header) {
  if (const Scheme* found = moepack::find_scheme(header.cell, header.group)) return *found;
  throw py::value_error("blob: no scheme has its cell and group");
}

py::tuple read_header(const Bytes& blob) {
  const moepack::PackedHeader header = header_of(blob);
  return py::make_tuple(header.version, std::string(scheme_of(header).name), header.rows, header.cols,
                        header.scale_exponent, header.row_order, header.payload_crc32);
}

void verify(const Bytes& blob) {
  require(blob.ndim() == 1, "blob: expected one dimension");
  Status status;
  {
    const py::gil_scoped_release release;
    status = moepack::verify(blob.data(), blob.size());
  }
  require(status);
}

void unpack(const Bytes& blob, Codes& codes, Scales& scales) {
  const moepack::PackedHeader header = header_of(blob);
  const auto [rows, cols] = matrix_shape(scheme_of(header), codes, scales);
  require(rows == header.rows && cols == header.cols, "codes: expected the blob's rows and columns");
  std::int8_t* code = codes.mutable_data();
  void* scale = scales.mutable_data();
  const py::gil_scoped_release release;
  moepack::unpack(blob.data(), code, scale);
}

std::int32_t scale_exponent(const std::string& name, const Weights& weights) {
  const Scheme& scheme = scheme_named(name);
  const py::gil_scoped_release release;
  return moepack::scale_exponent(scheme, weights.data(), weights.size());
}

std::optional<std::pair<std::int64_t, std::int64_t>> quantize_search(const std::string& name, const Weights& weights,
                                                                     std::int32_t exponent, Codes& codes,
                                                                     Scales& scales) {
  const Scheme& scheme = scheme_named(name);
  const auto [rows, cols] = matrix_shape(scheme, codes, scales);
  require(weights.ndim() == 2 && weights.shape(0) == rows && weights.shape(1) == cols,
          "weights: expected the shape of codes");
  std::int8_t* code = codes.mutable_data();
  void* scale = scales.mutable_data();
  moepack::NonFinite found;
  {
    const py::gil_scoped_release release;
    found = moepack::quantize_search(scheme, weights.data(), rows, cols, exponent, code, scale);
  }
  if (found.row < 0) return std::nullopt;
  return std::pair{found.row, found.col};
}

std::pair<double, double> compare(const std::string& name, const Weights& weights, const Codes& codes,
                                  const Scales& scales, std::int32_t exponent) {
  const Scheme& scheme = scheme_named(name);
  const auto [rows, cols] = matrix_shape(scheme, codes, scales);
  require(weights.ndim() == 2 && weights.shape(0) == rows && weights.shape(1) == cols,
          "weights: expected the shape of codes");
  const float* weight = weights.data();
  const std::int8_t* code = codes.data();
  const void* scale = scales.data();
  const py::gil_scoped_release release;
  const moepack::Squares found = moepack::compare(scheme, weight, rows, cols, code, scale, exponent);
  return {found.weights, found.errors};
}

void decode(const Weights& table, const Bytes& bytes, const Weights& factors, std::int64_t block_rows,
            std::int64_t block_cols, Weights& weights) {
  require(table.ndim() == 2 && table.shape(0) == 256 && (table.shape(1) == 1 || table.shape(1) == 2),
          "table: expected [256, 1 or 2]");
  require(bytes.ndim() == 2 && factors.ndim() == 2 && weights.ndim() == 2,
          "bytes, factors, weights: expected two dimensions");
  const int per_byte = static_cast<int>(table.shape(1));
  const std::int64_t rows = bytes.shape(0), cols = bytes.shape(1) * per_byte;
  require(weights.shape(0) == rows && weights.shape(1) == cols, "weights: expected the shape of the codes");
  require(block_rows > 0 && block_cols > 0 && (block_cols % per_byte == 0 || block_cols >= cols),
          "blocks: expected whole bytes");
  require(factors.shape(0) == moepack::ceil_div(rows, block_rows) &&
              factors.shape(1) == moepack::ceil_div(cols, block_cols),
          "factors: expected one for each block");
  const moepack::ByteValues values{table.data(), per_byte};
  const moepack::BlockFactors grid{factors.data(), block_rows, block_cols};
  const std::uint8_t* byte = bytes.data();
  float* weight = weights.mutable_data();
  const py::gil_scoped_release release;
  moepack::decode(values, byte, rows, cols, grid, weight);
}

std::vector<std::tuple<std::string, bool, bool>> isa_table() {
  std::vector<std::tuple<std::string, bool, bool>> table;
  for (int i = 0; i < moepack::isa_count(); ++i) {
    const moepack::IsaInfo info = moepack::isa_info(i);
    table.emplace_back(info.name, info.supported, info.chosen_by_default);
  }
  return table;
}

std::string active_isa() {
  const char* name = nullptr;
  require(moepack::active_isa(name));
  return name;
}

void force_isa(const std::optional<std::string>& name) { require(moepack::force_isa(name ? name->c_str() : nullptr)); }

// One thread per worker, started for the call: what is measured takes much longer.
moepack::ParallelFor started_threads(int count) {
  require(count >= 1, "threads: expected at least 1");
  if (count == 1) return moepack::serial();
  return {count,
          [](void*, int tasks, void (*body)(void*, int), void* argument) {
            std::vector<std::thread> workers;
            for (int i = 1; i < tasks; ++i) workers.emplace_back(body, argument, i);
            body(argument, 0);
            for (std::thread& worker : workers) worker.join();
          },
          nullptr};
}

std::uint64_t read_memory(const Bytes& bytes, int threads, bool ahead) {
  const moepack::ParallelFor parallel = started_threads(threads);
  const py::gil_scoped_release release;
  return moepack::read_memory(bytes.data(), bytes.size(), ahead, parallel);
}

std::int64_t int4_peak(std::int64_t rounds) {
  std::int64_t macs = 0;
  Status status;
  {
    const py::gil_scoped_release release;
    status = moepack::int4_peak(rounds, macs);
  }
  require(status);
  return macs;
}

// A call as Meta kernels see it: a tensor is None or (dtype, sizes), a size that is not fixed is -1.
class TracedStack {
 public:
  explicit TracedStack(py::args arguments) : arguments_(std::move(arguments)) {}

  moepack::ops::TensorArgument tensor(const char* name) { return optional_tensor(name); }
  moepack::ops::TensorArgument optional_tensor(const char* name) {
    const py::object value = next();
    if (value.is_none()) return {name};
    const auto [dtype, sizes] = value.cast<std::pair<std::string, std::vector<std::int64_t>>>();
    moepack::ops::TensorArgument argument{name, true};
    argument.element = moepack::ops::element_number(dtype);
    argument.rank = static_cast<int>(sizes.size());
    for (int i = 0; i < argument.rank && i < moepack::ops::TensorArgument::kMaxRank; ++i) argument.sizes[i] = sizes[i];
    return argument;
  }
  std::int64_t integer() { return next().cast<std::int64_t>(); }
  double number() { return next().cast<double>(); }
  bool flag() { return next().cast<bool>(); }
  std::string_view text() { return next().cast<std::string_view>(); }

  bool exhausted() const { return position_ == arguments_.size(); }

 private:
  py::object next() {
    require(position_ < arguments_.size(), "too few arguments for the operator's schema");
    return arguments_[position_++];
  }

  py::args arguments_;
  std::size_t position_ = 0;
};

// The arguments of the functional operator, or those of its .out variant.
template <bool routed>
void check_call(py::args arguments) {
  TracedStack in(std::move(arguments));
  moepack::ops::Call call = moepack::ops::read_call(in, routed);
  Status status = moepack::ops::check(call);
  if (status.ok() && !in.exhausted()) status = moepack::ops::check_out(call, in.tensor("out"));
  // The error that the CPU kernel raises, type included.
  if (!status.ok()) throw std::runtime_error(std::string(call.op) + ": " + status.message());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of moepack.";
  m.def("schemes", schemes, "Rows of the scheme table: name, cell, bits, scale type, group, code_min, code_max.");
  m.def("packed_bytes", packed_bytes, py::arg("scheme"), py::arg("rows"), py::arg("cols"), py::arg("row_order"));
  m.def("pack", pack, py::arg("scheme"), py::arg("row_order"), py::arg("codes").noconvert(),
        py::arg("scales").noconvert(), py::arg("exponent"), py::arg("blob").noconvert());
  m.def("unpack", unpack, py::arg("blob").noconvert(), py::arg("codes").noconvert(), py::arg("scales").noconvert());
  m.def("read_header", read_header, py::arg("blob").noconvert(),
        "version, scheme, rows, cols, exponent, row order, crc32 of a blob.");
  m.def("verify", verify, py::arg("blob").noconvert());
  m.def("scale_exponent", scale_exponent, py::arg("scheme"), py::arg("weights").noconvert());
  m.def("quantize_search", quantize_search, py::arg("scheme"), py::arg("weights").noconvert(), py::arg("exponent"),
        py::arg("codes").noconvert(), py::arg("scales").noconvert(),
        "Fills codes and scales; returns (row, column) of the first weight that is not finite, or None.");
  m.def("compare", compare, py::arg("scheme"), py::arg("weights").noconvert(), py::arg("codes").noconvert(),
        py::arg("scales").noconvert(), py::arg("exponent"),
        "Sums of squares of the weights, and of what codes and scales leave of them.");
  m.def("decode", decode, py::arg("table").noconvert(), py::arg("bytes").noconvert(), py::arg("factors").noconvert(),
        py::arg("block_rows"), py::arg("block_cols"), py::arg("weights").noconvert(),
        "weights = table[bytes] * factor of the block; the table has one or two values for each byte.");
  m.def("isa_table", isa_table, "Instruction sets, best first: name, supported here, chosen by default.");
  m.def("active_isa", active_isa);
  m.def("force_isa", force_isa, py::arg("name").none(true));
  m.def("read_memory", read_memory, py::arg("bytes").noconvert(), py::arg("threads"), py::arg("ahead"),
        "Reads all bytes once, with or without the kernels' prefetching; the caller takes the time.");
  m.def("int4_peak", int4_peak, py::arg("rounds"),
        "Runs the integer part of an int4 tile in L1; returns its multiply-accumulates.");
  m.def("check_quantized_moe_ffn", check_call<true>,
        "The checks of the operator's CPU kernel. Arguments as in its schema, tensors as None or (dtype, sizes).");
  m.def("check_quantized_experts", check_call<false>);
}
