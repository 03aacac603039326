// The contract of a kernel: what an instruction set has to provide, as a table of functions. No allocation, no threads,
// no state; any number of rows. Included by the ISA files: nothing of the standard library beyond <cstdint>.
#pragma once

#include <cstdint>

namespace moepack::gemm {

// Values of an activation row that share one scale.
#ifndef MOEPACK_ACTIVATION_GROUP
#define MOEPACK_ACTIVATION_GROUP 128
#endif
constexpr int kActivationGroup = MOEPACK_ACTIVATION_GROUP;
constexpr int kLanes = 16;     // columns of a panel, floats of a vector
constexpr int kZeroPoint = 8;  // what int4 cells add to a code

// How far ahead of the weights in use a tile asks for the next ones: far enough to cover an access to DRAM, near enough
// that the lines are still in L1 when they are due.
constexpr int kPrefetchBytes = 8192;

// Activations, a row per token or per (token, slot), padded with zeros to whole weight groups.
// Quantized, per row: a code per k; a scale per activation group; -8 * (sum of codes) per weight group, which cancels
// the offset of int4 codes. For fp8 weights they are not quantized: values alone.
struct Rows {
  std::int8_t* codes;
  float* scales;
  std::int32_t* offsets;
  std::int64_t code_stride, scale_stride, offset_stride;
  float* values;
  std::int64_t value_stride;
};

// What a panel is made of: the cells of a group, then its 16 scales. The universal kinds are torchao's (universal.h).
enum class PanelKind { int4, int8, mxfp4, fp8, int4_universal, int8_universal, count };

// 16 output columns of a packed matrix.
struct Panel {
  const std::uint8_t* bytes;
  int groups;   // weight groups along K
  int group;    // k per weight group: 32, 64 or 128
  float scale;  // of the results: a power of two
};

// What stands between the two GEMMs; docs/reference/op.md has the formulas. Zero stands for "none".
struct Activation {
  enum class Kind { silu, gelu_tanh, swiglu_oai, relu, relu2 };
  Kind kind;
  bool gated;
  float alpha;
  float limit;
  bool limit_after_act;
  float gate_softcap, up_softcap;
};

struct Kernel {
  const char* name;

  // out[r * out_stride + c] = panel column c . row index[r] (+ bias[c] unless null), for r < count.
  using Gemm = void (*)(const Panel& panel, const Rows& rows, const std::int32_t* index, int count, const float* bias,
                        float* out, std::int64_t out_stride);
  Gemm gemm[static_cast<int>(PanelKind::count)];

  // values[0 .. n) -> codes (zeros up to a multiple of group), scales, offsets.
  void (*quantize)(const float* values, std::int64_t n, int group, std::int8_t* codes, float* scales,
                   std::int32_t* offsets);
  // out = act(gate, up), n a multiple of 16; out may be gate or up. up is not read unless the activation is gated.
  void (*activate)(const Activation& activation, const float* gate, const float* up, float* out, std::int64_t n);
  // logits[i] = x . weights[i * d], for i < experts.
  void (*router)(const float* x, const float* weights, std::int64_t d, int experts, float* logits);
  // v = exp(v - shift), v = 1 / (1 + exp(-v)): n values.
  void (*exp_minus)(float* v, int n, float shift);
  void (*sigmoid)(float* v, int n);
  // v = v * factor, n a multiple of 16.
  void (*scale)(float factor, float* v, std::int64_t n);
  // y = fma(weight, o, y), 16 values.
  void (*accumulate)(float weight, const float* o, float* y);
  // The integer part of an int4 tile over 32 k in L1, `rounds` times; returns its multiply-accumulates.
  std::int64_t (*int4_peak)(std::int64_t rounds);
};

}  // namespace moepack::gemm
