// NEON with dot products (Armv8.2 dotprod).
#include "gemm/instantiate.h"
#include "gemm/isa/dot_neon.h"

namespace moepack::gemm {
namespace {

struct NeonDot : DotNeon {
  static constexpr int tile_rows = 4;
};

}  // namespace

extern const Kernel neondot_kernel;
const Kernel neondot_kernel = instantiate<NeonDot>("neondot");

}  // namespace moepack::gemm
