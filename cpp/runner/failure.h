#pragma once

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <string>

namespace runner {

// What the user is told, in one line.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// '?' for line ends and the like, which paths and arguments may hold.
inline std::string one_line(std::string text) {
  const auto is_control = [](unsigned char byte) { return std::iscntrl(byte) != 0; };
  std::replace_if(text.begin(), text.end(), is_control, '?');
  return text;
}

}  // namespace runner
