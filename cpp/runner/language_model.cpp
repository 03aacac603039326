#include "language_model.h"

#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/tensor/tensor.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <utility>

#include "failure.h"
#include "huge_pages.h"
#include "runtime_log.h"
#include "verification.h"

namespace runner {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::MmapDataLoader;
using executorch::extension::Module;
using executorch::runtime::DataLoader;
using executorch::runtime::Error;

constexpr auto kChecked = executorch::runtime::Program::Verification::InternalConsistency;

[[noreturn]] void fail(const std::string& path, const std::string& what, Error error) {
  char code[16];
  std::snprintf(code, sizeof code, "0x%x", static_cast<unsigned>(error));
  const std::string log = take_log();
  throw Failure(path + ": " + what + " (error " + code + ")" + (log.empty() ? "" : ": " + log));
}

std::unique_ptr<DataLoader> mapped(const std::string& path, bool huge_pages) {
  auto loader = MmapDataLoader::from(path.c_str(), MmapDataLoader::MlockConfig::NoMlock);
  if (!loader.ok()) fail(path, "cannot be opened", loader.error());
  auto file = std::make_unique<MmapDataLoader>(std::move(*loader));
  if (huge_pages) return on_huge_pages(std::move(file));
  return file;
}

std::int64_t likeliest(const executorch::aten::Tensor& logits) {
  const std::int64_t vocabulary = logits.size(logits.dim() - 1);
  const float* const last = logits.const_data_ptr<float>() + (logits.numel() - vocabulary);
  return std::max_element(last, last + vocabulary) - last;
}

}  // namespace

LanguageModel::LanguageModel(const Options& options) : path_(options.program) {
  load(options);
  context_ = constants("get_max_seq_len").front();
  vocabulary_ = constants("get_vocab_size").front();
  for (const std::int64_t id : constants("get_eos_ids")) ends_.insert(id);
  read_inputs();
}

void LanguageModel::load(const Options& options) {
  const bool apart = !options.weights.empty();
  auto program = mapped(path_, options.huge_pages);
  auto weights = apart ? mapped(options.weights, options.huge_pages) : nullptr;
  module_ = std::make_unique<Module>(std::move(program), nullptr, nullptr, nullptr, std::move(weights));
  if (const Error error = module_->load(kChecked); error != Error::Ok) {
    fail(path_,
         apart ? "is no program, or " + options.weights + " no weights, that can be read"
               : "is no program that can be read",
         error);
  }
  auto kernels = options.verify ? verifying_kernels() : std::vector<executorch::runtime::Kernel>{};
  if (const Error error = module_->load_forward(nullptr, nullptr, nullptr, std::move(kernels)); error != Error::Ok) {
    const bool may_lack_weights = !apart && error != Error::OperatorMissing;
    fail(path_,
         may_lack_weights ? "cannot run here; if its weights lie in a .ptd file, give it with --weights"
                          : "cannot run here",
         error);
  }
}

void LanguageModel::read_inputs() {
  const auto meta = module_->method_meta("forward");
  if (!meta.ok()) fail(path_, "method forward cannot be read", meta.error());
  const bool two = meta->num_inputs() == 2;
  const auto tokens = two ? meta->input_tensor_meta(0) : Error::InvalidProgram;
  const auto position = two ? meta->input_tensor_meta(1) : Error::InvalidProgram;
  if (!tokens.ok() || tokens->sizes().size() != 2 || !position.ok())
    fail(path_, "forward takes other inputs than tokens and positions", Error::InvalidProgram);
  most_tokens_ = std::max<std::int64_t>(tokens->sizes()[1], 1);
  all_positions_ = position->sizes().size() == 1 && position->sizes()[0] > 1;
  const auto logits = meta->output_tensor_meta(0);
  if (!logits.ok() || logits->scalar_type() != ScalarType::Float || logits->sizes().empty() ||
      logits->sizes()[logits->sizes().size() - 1] != vocabulary_) {
    fail(path_, "forward gives no fp32 logits over the vocabulary", Error::InvalidProgram);
  }
}

std::vector<std::int64_t> LanguageModel::constants(const std::string& method) {
  const auto values = module_->execute(method);
  if (!values.ok()) fail(path_, "has no method " + method, values.error());
  std::vector<std::int64_t> found;
  for (const auto& value : *values) {
    if (!value.isInt()) fail(path_, method + " is no number", Error::InvalidProgram);
    found.push_back(value.toInt());
  }
  if (found.empty()) fail(path_, method + " is empty", Error::InvalidProgram);
  return found;
}

std::vector<std::int64_t> LanguageModel::positions(std::int64_t first, std::int64_t count) const {
  std::vector<std::int64_t> found(all_positions_ ? count : 1);
  std::iota(found.begin(), found.end(), first);
  return found;
}

void LanguageModel::check(const std::vector<std::int64_t>& tokens, std::int64_t position) const {
  if (tokens.empty()) throw Failure("no tokens to run");
  const std::int64_t end = position + static_cast<std::int64_t>(tokens.size());
  if (end > context_) throw Failure(std::to_string(end) + " tokens, the context ends at " + std::to_string(context_));
  for (const std::int64_t id : tokens) {
    if (id < 0 || id >= vocabulary_) {
      throw Failure("token " + std::to_string(id) + ", the vocabulary is 0 to " + std::to_string(vocabulary_ - 1));
    }
  }
}

std::int64_t LanguageModel::next_token(const std::vector<std::int64_t>& tokens, std::int64_t position) {
  check(tokens, position);
  std::int64_t next = 0;
  for (auto from = tokens.begin(); from != tokens.end();) {
    const auto to = from + std::min<std::ptrdiff_t>(most_tokens_, tokens.end() - from);
    next = run({from, to}, position + (from - tokens.begin()));
    from = to;
  }
  return next;
}

std::int64_t LanguageModel::run(std::vector<std::int64_t> ids, std::int64_t position) {
  const auto count = static_cast<SizesType>(ids.size());
  std::vector<std::int64_t> where = positions(position, count);
  const auto input = executorch::extension::from_blob(ids.data(), {1, count}, ScalarType::Long);
  const auto at =
      executorch::extension::from_blob(where.data(), {static_cast<SizesType>(where.size())}, ScalarType::Long);
  const auto result = module_->forward({input, at});
  if (!result.ok()) fail(path_, "stopped", result.error());
  return likeliest(result->front().toTensor());
}

}  // namespace runner
