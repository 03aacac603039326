#include "threads.h"

#include <string>

#if __has_include(<executorch/extension/threadpool/threadpool.h>)
#include <executorch/extension/threadpool/threadpool.h>
#else
#include <cstddef>
// The wheel has this library without its header. Only what is called is declared, none of it depends on the layout of
// the class, and the linker refuses a library whose functions differ.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  std::size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(std::uint32_t count);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool
#endif

#include "failure.h"

namespace runner {

void set_threads(std::int64_t count) {
  auto* const pool = executorch::extension::threadpool::get_threadpool();
  if (pool == nullptr || !pool->_unsafe_reset_threadpool(static_cast<std::uint32_t>(count)))
    throw Failure("--threads " + std::to_string(count) + ": ExecuTorch cannot make that thread pool");
}

}  // namespace runner
