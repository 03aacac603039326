#pragma once

#include <stdexcept>

namespace runner {

// What the user is told, in one line.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace runner
