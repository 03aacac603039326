// ExecuTorch tells why it refuses a program only in its log: kept here, for the text of errors.
#pragma once

#include <string>

namespace runner {

// From now on the runtime's messages are kept instead of printed.
void keep_log();

// The operators that a program lacked, else the errors, since the last call.
std::string take_log();

}  // namespace runner
