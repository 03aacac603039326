#pragma once

// Same source, same order of operations, wider registers where the CPU has them: the bytes stay the same.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define MOEPACK_CLONES [[gnu::target_clones("avx2", "default")]]
#define MOEPACK_INLINE [[gnu::always_inline]] inline
#else
#define MOEPACK_CLONES
#define MOEPACK_INLINE inline
#endif
