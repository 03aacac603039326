// The command line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace runner {

struct Options {
  std::string program;
  std::string weights;
  std::string tokenizer;
  std::string prompt;
  bool begin_text = false;
  std::int64_t max_new_tokens = -1;  // until the end of the text or of the context
  std::int64_t threads = 0;          // as many as ExecuTorch takes
  bool verify = false;
  bool huge_pages = false;
  bool help = false;
};

extern const char kUsage[];

// Throws Failure.
Options parse(const std::vector<std::string>& arguments);

}  // namespace runner
