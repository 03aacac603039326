// What a program may ask of the ExecuTorch kernels. They register themselves when their library is loaded; only what
// changes the behaviour of others' operators has to be called.
#pragma once

extern "C" void moepack_accelerate_upstream(bool on);

namespace moepack {

// Programs that call ExecuTorch's own `llama::quantized_moe_ffn.out` run on moepack's kernel from now on, whether or
// not ExecuTorch's library of custom operators is loaded, now or later. To be called before such a program's method is
// loaded, and not while one is being loaded: ExecuTorch's registry has no lock. Once is enough.
//
// x, the router's weights and the result are fp32, groups are 32, 64 or 128; what ends the process in upstream's kernel
// is Error::InvalidArgument here. docs/how-to/accelerate-upstream.md says how far the results may differ.
inline void accelerate_upstream() { moepack_accelerate_upstream(true); }

// Hands the calls back to ExecuTorch's own kernel, also those of methods that are loaded. Where that is not in the
// process they fail with Error::OperatorMissing: the registry does not forget a kernel.
inline void restore_upstream() { moepack_accelerate_upstream(false); }

}  // namespace moepack
