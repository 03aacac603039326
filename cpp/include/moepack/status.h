// An error without exceptions or allocation: the core runs inside runtimes that allow neither.
#pragma once

#include <cstdarg>
#include <cstdio>

namespace moepack {

class [[nodiscard]] Status {
 public:
  Status() { message_[0] = '\0'; }

#if defined(__GNUC__)
  [[gnu::format(printf, 1, 2)]]
#endif
  static Status error(const char* format, ...) {
    Status status;
    status.ok_ = false;
    va_list args;
    va_start(args, format);
    std::vsnprintf(status.message_, sizeof status.message_, format, args);
    va_end(args);
    return status;
  }

  bool ok() const { return ok_; }
  const char* message() const { return message_; }

 private:
  bool ok_ = true;
  char message_[320];
};

}  // namespace moepack
