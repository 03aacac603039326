// The experts: quantize x, GEMM with w1 and w3 side by side, activation, quantize, GEMM with w2, weighted sum.
// Nothing is quantized where weights are fp8.
//
// Suffixes: _TK pairs in (token, slot) order, _P pairs sorted by expert.
#include <algorithm>

#include "activation.h"
#include "dtype.h"
#include "gemm/registry.h"
#include "grouping.h"
#include "matrix.h"
#include "moepack/ffn.h"
#include "tasks.h"
#include "workspace.h"

namespace moepack {
namespace {

using gemm::kActivationGroup;
using gemm::Panel;
using gemm::Rows;

constexpr std::int64_t kMaxPairs = 4096;    // tokens are taken in chunks of so many pairs: bounds the workspace
constexpr std::int64_t kRowBlock = 32;      // rows whose hidden values are computed at once; they stay in L1
constexpr std::int64_t kOutFloats = 65536;  // outputs of all pairs for some columns, per worker; they stay in L2
constexpr std::int64_t kMaxOutPanels = 8;

// fp8 weights are multiplied with fp32 activations.
bool keeps_values(const Scheme& scheme) { return scheme.cell == Cell::fp8; }

std::int64_t chunk_tokens(const Shape& s, const Scheme& scheme) {
  const std::int64_t pairs = keeps_values(scheme) ? kMaxPairs / static_cast<std::int64_t>(sizeof(float)) : kMaxPairs;
  return std::max<std::int64_t>(1, std::min(s.T, pairs / s.K));
}

Rows take_rows(Arena& arena, std::int64_t count, std::int64_t cols, const Scheme& scheme) {
  const int group = scheme.group;
  Rows rows{};
  if (keeps_values(scheme)) {
    rows.value_stride = round_up(cols, group);
    rows.values = arena.take<float>(count * rows.value_stride);
    return rows;
  }
  rows.code_stride = round_up(cols, std::max(group, 64));
  rows.scale_stride = ceil_div(cols, kActivationGroup);
  rows.offset_stride = ceil_div(cols, group);
  rows.codes = arena.take<std::int8_t>(count * rows.code_stride);
  rows.scales = arena.take<float>(count * rows.scale_stride);
  rows.offsets = arena.take<std::int32_t>(count * rows.offset_stride);
  return rows;
}

// A worker's own memory.
struct Scratch {
  float* row;     // one row of x
  float* hidden;  // [kRowBlock][hidden block]
  float* up;
  float* out;  // [pairs][panels of one task * 16]
};

struct Buffers {
  Buffers(const Shape& s, const Scheme& scheme, int threads, void* base) : arena(base) {
    const std::int64_t tokens = chunk_tokens(s, scheme), pairs = tokens * s.K;
    hidden_block = round_up(std::min<std::int64_t>(kActivationGroup, s.F), kPanelColumns);
    out_panels = std::clamp<std::int64_t>(kOutFloats / (pairs * kPanelColumns), 1, kMaxOutPanels);
    x = take_rows(arena, tokens, s.D, scheme);
    h = take_rows(arena, pairs, s.F, scheme);
    grouping.token = arena.take<std::int32_t>(pairs);
    grouping.pair = arena.take<std::int32_t>(pairs);
    grouping.position = arena.take<std::int32_t>(pairs);
    grouping.starts = arena.take<std::int32_t>(s.E + 1);
    grouping.segments = arena.take<Segment>(Grouping::max_segments(pairs, s.E));
    identity = arena.take<std::int32_t>(pairs);
    scratch = arena.take<Scratch>(threads);
    for (int worker = 0; worker < threads; ++worker) {
      const Scratch own = {arena.take<float>(s.D), arena.take<float>(kRowBlock * hidden_block),
                           arena.take<float>(kRowBlock * hidden_block),
                           arena.take<float>(pairs * out_panels * kPanelColumns)};
      if (base) scratch[worker] = own;
    }
  }

  Arena arena;
  std::int64_t hidden_block;  // columns of w1 and of w3 per task: the activation group that a task quantizes
  std::int64_t out_panels;    // panels of w2 per task, at most
  Rows x, h;
  Grouping grouping;
  std::int32_t* identity;  // 0, 1, 2, ...
  Scratch* scratch;
};

// A bias vector cut at a panel, padded with zeros where the panel sticks out. Null stays null.
const float* panel_bias(const float* bias, std::int64_t left, float* padded) {
  if (!bias || left >= kPanelColumns) return bias;
  std::fill_n(std::copy_n(bias, left, padded), kPanelColumns - left, 0.0f);
  return padded;
}

class Experts {
 public:
  Experts(const Shape& shape, const ExpertAttributes& attributes, const ExpertTensors& tensors, const void* x,
          DType dtype, void* out, void* workspace, const ParallelFor& parallel, const gemm::Kernel& kernel)
      : s_(shape),
        scheme_(*find_scheme(attributes.scheme)),
        tensors_(tensors),
        x_(x),
        dtype_(dtype),
        out_(out),
        parallel_(parallel),
        kernel_(kernel),
        activation_(activation_of(attributes)),
        weight_on_input_(attributes.weight_on_input),
        w13_(Matrix::w13(shape, attributes)),
        w2_(Matrix::w2(shape, attributes)),
        gemm_(w13_.gemm(kernel)),
        buffers_(shape, scheme_, parallel.threads, workspace) {
    const std::int64_t pairs = chunk_tokens(shape, scheme_) * shape.K;
    for (std::int64_t p = 0; p < pairs; ++p) buffers_.identity[p] = static_cast<std::int32_t>(p);
  }

  // Ids in range, headers of every expert that is used as the call says.
  Status check(const std::int64_t* topk_ids) {
    std::int32_t* seen = buffers_.grouping.starts;
    std::fill_n(seen, s_.E, 0);
    for (std::int64_t pair = 0; pair < s_.T * s_.K; ++pair) {
      const std::int64_t id = topk_ids[pair];
      if (id < 0 || id >= s_.E)
        return Status::error("topk_ids[%lld, %lld] = %lld is outside 0..%lld", static_cast<long long>(pair / s_.K),
                             static_cast<long long>(pair % s_.K), static_cast<long long>(id),
                             static_cast<long long>(s_.E - 1));
      seen[id] = 1;
    }
    for (std::int64_t e = 0; e < s_.E; ++e)
      if (seen[e])
        if (Status status = check_blobs(e); !status.ok()) return status;
    return {};
  }

  void run(const std::int64_t* ids_TK, const float* weights_TK) {
    const std::int64_t step = chunk_tokens(s_, scheme_);
    for (std::int64_t begin = 0; begin < s_.T; begin += step) {
      first_token_ = begin;
      tokens_ = std::min(step, s_.T - begin);
      buffers_.grouping.sort(ids_TK + begin * s_.K, tokens_, s_.K, s_.E);
      run_chunk(weights_TK + begin * s_.K);
    }
  }

 private:
  const std::uint8_t* blob13(std::int64_t e) const { return tensors_.packed_w13 + e * tensors_.bytes13; }
  const std::uint8_t* blob2(std::int64_t e) const { return tensors_.packed_w2 + e * tensors_.bytes2; }

  Status check_blobs(std::int64_t e) const {
    Status status = w13_.check(blob13(e), tensors_.bytes13);
    if (!status.ok()) return Status::error("expert %lld, w13: %s", static_cast<long long>(e), status.message());
    status = w2_.check(blob2(e), tensors_.bytes2);
    if (!status.ok()) return Status::error("expert %lld, w2: %s", static_cast<long long>(e), status.message());
    return {};
  }

  void run_chunk(const float* weights_TK) {
    const Grouping& grouping = buffers_.grouping;
    const std::int64_t blocks = ceil_div(s_.F, buffers_.hidden_block), panels = ceil_div(s_.D, kPanelColumns);
    // Enough tasks that no worker waits long for the last one.
    const std::int64_t per_task = std::clamp<std::int64_t>(panels / (4 * parallel_.threads), 1, buffers_.out_panels);
    const Phase inputs{tokens_, [&](int worker, std::int64_t token) { prepare_x(token, buffers_.scratch[worker]); }};
    const Phase hidden{grouping.segment_count * blocks, [&](int worker, std::int64_t task) {
                         compute_hidden(grouping.segments[task / blocks], task % blocks, weights_TK,
                                        buffers_.scratch[worker]);
                       }};
    const Phase outputs{ceil_div(panels, per_task), [&](int worker, std::int64_t task) {
                          const std::int64_t first = task * per_task;
                          compute_out(first, std::min(per_task, panels - first), weights_TK, buffers_.scratch[worker]);
                        }};
    run_phases(parallel_, inputs, hidden, outputs);
  }

  void prepare_x(std::int64_t token, const Scratch& scratch) {
    const float* row = to_float(x_, dtype_, (first_token_ + token) * s_.D, s_.D, scratch.row);
    prepare(row, s_.D, buffers_.x, token, 0);
  }

  // Values of a row, from a column that begins an activation group on, as the GEMM takes them.
  void prepare(const float* values, std::int64_t count, const Rows& rows, std::int64_t row, std::int64_t column) {
    if (keeps_values(scheme_)) {
      float* const end = std::copy_n(values, count, rows.values + row * rows.value_stride + column);
      std::fill_n(end, round_up(count, scheme_.group) - count, 0.0f);
      return;
    }
    kernel_.quantize(values, count, scheme_.group, rows.codes + row * rows.code_stride + column,
                     rows.scales + row * rows.scale_stride + column / kActivationGroup,
                     rows.offsets + row * rows.offset_stride + column / scheme_.group);
  }

  void compute_hidden(const Segment& segment, std::int64_t block, const float* weights_TK, const Scratch& scratch) {
    for (std::int32_t row = 0; row < segment.count; row += kRowBlock)
      hidden_rows(segment.expert, block * buffers_.hidden_block, segment.begin + row,
                  std::min<std::int64_t>(kRowBlock, segment.count - row), weights_TK, scratch);
  }

  // Hidden values of some rows of an expert for one block of columns: gate and up, activation, quantized.
  void hidden_rows(std::int64_t e, std::int64_t column, std::int64_t position, std::int64_t count,
                   const float* weights_TK, const Scratch& scratch) {
    const std::int64_t columns = std::min(buffers_.hidden_block, s_.F - column);
    const std::int64_t width = round_up(columns, kPanelColumns);
    const std::int32_t* index = buffers_.grouping.token + position;
    for (std::int64_t c = 0; c < width; c += kPanelColumns) {
      const float* bias = tensors_.bias13 ? tensors_.bias13 + e * w13_.rows() + column + c : nullptr;
      const auto multiply = [&](bool up, float* out) {
        float padded[kPanelColumns];
        const Panel panel = w13_.panel(blob13(e), (column + c) / kPanelColumns, up);
        gemm_(panel, buffers_.x, index, static_cast<int>(count),
              panel_bias(bias && up ? bias + s_.F : bias, columns - c, padded), out + c, width);
      };
      multiply(false, scratch.hidden);
      if (activation_.gated) multiply(true, scratch.up);
    }
    if (weight_on_input_)
      for (std::int64_t r = 0; r < count; ++r) {
        const float weight = weights_TK[buffers_.grouping.pair[position + r]];
        kernel_.scale(weight, scratch.hidden + r * width, width);
        if (activation_.gated) kernel_.scale(weight, scratch.up + r * width, width);
      }
    kernel_.activate(activation_, scratch.hidden, scratch.up, scratch.hidden, count * width);
    for (std::int64_t r = 0; r < count; ++r)
      prepare(scratch.hidden + r * width, columns, buffers_.h, position + r, column);
  }

  // Some columns of the output for all tokens: every expert's rows first, then each token's sum in slot order.
  void compute_out(std::int64_t first, std::int64_t panels, const float* weights_TK, const Scratch& scratch) {
    const std::int64_t width = panels * kPanelColumns, column = first * kPanelColumns;
    const Grouping& grouping = buffers_.grouping;
    for (std::int64_t i = 0; i < grouping.segment_count; ++i) {
      const Segment& segment = grouping.segments[i];
      for (std::int64_t p = 0; p < panels; ++p) {
        const std::int64_t c = column + p * kPanelColumns;
        float padded[kPanelColumns];
        const float* bias = tensors_.bias2 ? tensors_.bias2 + segment.expert * s_.D + c : nullptr;
        const Panel panel = w2_.panel(blob2(segment.expert), first + p, false);
        gemm_(panel, buffers_.h, buffers_.identity + segment.begin, segment.count, panel_bias(bias, s_.D - c, padded),
              scratch.out + segment.begin * width + p * kPanelColumns, width);
      }
    }
    for (std::int64_t t = 0; t < tokens_; ++t) {
      float y[kMaxOutPanels * kPanelColumns] = {};
      for (std::int64_t pair = t * s_.K; pair < (t + 1) * s_.K; ++pair)
        for (std::int64_t c = 0; c < width; c += kPanelColumns)
          kernel_.accumulate(weight_on_input_ ? 1.0f : weights_TK[pair],
                             scratch.out + grouping.position[pair] * width + c, y + c);
      from_float(y, std::min(width, s_.D - column), out_, dtype_, (first_token_ + t) * s_.D + column);
    }
  }

  const Shape& s_;
  const Scheme& scheme_;
  const ExpertTensors& tensors_;
  const void* x_;
  const DType dtype_;
  void* out_;
  const ParallelFor& parallel_;
  const gemm::Kernel& kernel_;
  const gemm::Activation activation_;
  const bool weight_on_input_;
  const Matrix w13_, w2_;
  const gemm::Kernel::Gemm gemm_;
  Buffers buffers_;
  std::int64_t first_token_ = 0;
  std::int64_t tokens_ = 0;
};

}  // namespace

std::size_t experts_workspace_bytes(const Shape& shape, const ExpertAttributes& attributes, int threads) {
  return Buffers(shape, *find_scheme(attributes.scheme), threads, nullptr).arena.used();
}

Status quantized_experts(const Shape& shape, const ExpertAttributes& attributes, const ExpertTensors& tensors,
                         const void* x, DType dtype, const std::int64_t* topk_ids, const float* topk_weights, void* out,
                         void* workspace, const ParallelFor& parallel) {
  const gemm::Kernel* kernel = nullptr;
  if (Status status = gemm::active_kernel(kernel); !status.ok()) return status;
  if (shape.T == 0) return {};
  Experts experts(shape, attributes, tensors, x, dtype, out, workspace, parallel, *kernel);
  if (Status status = experts.check(topk_ids); !status.ok()) return status;
  experts.run(topk_ids, topk_weights);
  return {};
}

}  // namespace moepack
