// Weights on huge pages. Decoding reads all of them once per token, and with pages of 4 KiB every read of new weights
// also waits for the page table. A mapped file cannot have huge pages on most systems, so this costs a copy in memory.
#pragma once

#include <executorch/runtime/core/data_loader.h>

#include <memory>

namespace runner {

// Loads what `file` loads, constants of 2 MiB and more into memory for which huge pages are asked. Throws Failure where
// the system has none.
std::unique_ptr<executorch::runtime::DataLoader> on_huge_pages(std::unique_ptr<executorch::runtime::DataLoader> file);

// How much memory of this process is on huge pages now, in bytes; -1 where the system does not say.
long long huge_page_bytes();

}  // namespace runner
