#pragma once

#include <cstdint>

namespace runner {

// Sizes ExecuTorch's thread pool. To be called while no program runs. Throws Failure.
void set_threads(std::int64_t count);

}  // namespace runner
