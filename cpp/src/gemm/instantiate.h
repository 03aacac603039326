// All functions of a kernel, instantiated for one instruction set. Since `I` lives in an anonymous namespace, so do its
// instantiations: the linker can never hand them to code meant for another CPU.
#pragma once

#include "gemm/elementwise.h"
#include "gemm/float_tile.h"
#include "gemm/tile.h"
#include "gemm/universal.h"

namespace moepack::gemm {

template <class I>
constexpr Kernel instantiate(const char* name) {
  return {
      name,
      {gemm<I, Int4Cell, HalfScales>, gemm<I, Int8Cell, HalfScales>, gemm_rows<CodeTile<I, Mxfp4Cell, E8m0Scales, 1>>,
       gemm_rows<FloatTile<I>>, universal_gemm<I, UniversalInt4Cell>, universal_gemm<I, UniversalInt8Cell>},
      quantize<I>,
      activate<I>,
      router<I>,
      exp_minus<I>,
      sigmoid<I>,
      scale<I>,
      accumulate<I>,
      int4_peak<I>};
}

}  // namespace moepack::gemm
