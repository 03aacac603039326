#include "runtime_log.h"

#include <executorch/runtime/platform/platform.h>

#include <cstdio>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "failure.h"

namespace runner {
namespace {

constexpr char kMissing[] = "Missing operator: ";  // followed by "[number] name"
constexpr char kArgument[] = "arg ";               // a list of a failed call's arguments, by number

std::mutex mutex;
std::set<std::string> missing;
std::vector<std::string> others;

void keep(et_timestamp_t, et_pal_log_level_t level, const char*, const char*, size_t, const char* text, size_t length) {
  if (level == kFatal) {  // the runtime ends the process next
    std::fprintf(stderr, "moepack_runner: %s\n", one_line({text, length}).c_str());
    return;
  }
  if (level != kError) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string message(text, length);
  if (message.rfind(kArgument, 0) == 0) return;
  const auto name = message.rfind(kMissing, 0) == 0 ? message.find(' ', sizeof kMissing - 1) : std::string::npos;
  if (name == std::string::npos) {
    others.push_back(message);
  } else {
    missing.insert(message.substr(name + 1));
  }
}

template <class Texts>
std::string joined(const Texts& texts, const char* between) {
  std::string found;
  for (const auto& text : texts) found += (found.empty() ? "" : between) + text;
  return found;
}

}  // namespace

void keep_log() { executorch::runtime::register_pal(executorch::runtime::PalImpl::create(&keep, __FILE__)); }

std::string take_log() {
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string text = missing.empty() ? joined(others, "; ") : "this program lacks " + joined(missing, ", ");
  missing.clear();
  others.clear();
  return text;
}

}  // namespace runner
