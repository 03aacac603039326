// One operator on one thread, called again and again: to time it, or for another program to count its instructions.
#pragma once

#include <string_view>

#include "layer.h"

namespace moepack::selftest {

struct OneOp {
  const char* isa;
  std::string_view scheme;
  std::int64_t tokens;
  int calls;
  Dimensions dimensions = {512, 256, 1, 1};
};

// Prints a line of JSON: multiply-accumulates of a call, the fastest call's time. False if a name or size is not
// supported or a result differs from the scalar kernel's.
bool run_one_op(const OneOp& op);

// Prints a line of JSON: the compiler and its major version, the instruction sets and whether this CPU runs them, the
// schemes.
void list();

}  // namespace moepack::selftest
