#include "huge_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <utility>

#include "failure.h"

namespace runner {
namespace {

using executorch::runtime::DataLoader;
using executorch::runtime::Error;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::Result;

constexpr std::size_t kHugePage = std::size_t{2} << 20;

class HugePageLoader final : public DataLoader {
 public:
  explicit HugePageLoader(std::unique_ptr<DataLoader> file) : file_(std::move(file)) {}

  Result<FreeableBuffer> load(std::size_t offset, std::size_t size, const SegmentInfo& info) const override {
    const bool weights =
        info.segment_type == SegmentInfo::Type::Constant || info.segment_type == SegmentInfo::Type::External;
    if (!weights || size < kHugePage) return file_->load(offset, size, info);
    // One page more, so that the copy can begin on a boundary: only whole huge pages can be huge.
    void* const memory = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return Error::MemoryAllocationFailed;
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    void* const start = static_cast<char*>(memory) + (kHugePage - address % kHugePage) % kHugePage;
#ifdef MADV_HUGEPAGE
    madvise(start, size, MADV_HUGEPAGE);  // a wish: the system may have none left
#endif
    if (const Error error = file_->load_into(offset, size, info, start); error != Error::Ok) {
      release(memory, start, size);
      return error;
    }
    mprotect(memory, size + kHugePage, PROT_READ);
    return FreeableBuffer(start, size, release, memory);
  }

  Error load_into(std::size_t offset, std::size_t size, const SegmentInfo& info, void* buffer) const override {
    return file_->load_into(offset, size, info, buffer);
  }

  Result<std::size_t> size() const override { return file_->size(); }

 private:
  static void release(void* memory, void*, std::size_t size) { munmap(memory, size + kHugePage); }

  std::unique_ptr<DataLoader> file_;
};

}  // namespace

std::unique_ptr<DataLoader> on_huge_pages(std::unique_ptr<DataLoader> file) {
#ifdef MADV_HUGEPAGE
  return std::make_unique<HugePageLoader>(std::move(file));
#else
  throw Failure("--huge-pages: this system gives no huge pages on request");
#endif
}

long long huge_page_bytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string name; rollup >> name; rollup.ignore(256, '\n')) {
    long long kilobytes = 0;
    if (name == "AnonHugePages:" && rollup >> kilobytes) return kilobytes * 1024;
  }
  return -1;
}

}  // namespace runner
