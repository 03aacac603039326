// What this machine can do at best: the limits that the operator's speed is held against, measured in the same run.
#pragma once

#include <cstdint>

#include "moepack/parallel.h"
#include "moepack/status.h"

namespace moepack {

// Reads all bytes once, each worker its own part, with the tiles' prefetching (`ahead`) or with the processor's alone:
// which is faster depends on the processor. Returns a sum that keeps the reads alive.
std::uint64_t read_memory(const std::uint8_t* bytes, std::int64_t count, bool ahead, const ParallelFor& parallel);

// Runs the integer inner loop of an int4 tile of the active instruction set on data in L1, without scales: the
// multiply-accumulates of a call, whose time the caller takes. Rounds: passes over 32 k.
Status int4_peak(std::int64_t rounds, std::int64_t& macs);

}  // namespace moepack
