// In the place of the core's registry: kernels whose intrinsics are emulated, which any CPU runs.
#include "gemm/registry.h"

#include <cstring>
#include <iterator>

#include "moepack/isa.h"

namespace moepack {
namespace gemm {

extern const Kernel scalar_kernel;
extern const Kernel avxvnni_kernel;
extern const Kernel avx512vnni_kernel;

namespace {

const Kernel* const kKernels[] = {&avx512vnni_kernel, &avxvnni_kernel, &scalar_kernel};
const Kernel* forced = nullptr;

}  // namespace

Status active_kernel(const Kernel*& kernel) {
  kernel = forced ? forced : kKernels[0];
  return {};
}

}  // namespace gemm

int isa_count() { return static_cast<int>(std::size(gemm::kKernels)); }
IsaInfo isa_info(int i) { return {gemm::kKernels[i]->name, true, true}; }

Status force_isa(const char* name) {
  gemm::forced = nullptr;
  if (!name) return {};
  for (const gemm::Kernel* kernel : gemm::kKernels)
    if (std::strcmp(kernel->name, name) == 0) gemm::forced = kernel;
  return gemm::forced ? Status() : Status::error("isa=%s: not among the emulated ones", name);
}

}  // namespace moepack
