#include "language_model.h"

#include <executorch/extension/tensor/tensor.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>

#include "runtime_log.h"

namespace runner {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::Module;
using executorch::runtime::Error;

constexpr auto kChecked = executorch::runtime::Program::Verification::InternalConsistency;
constexpr auto kMapped = Module::LoadMode::Mmap;  // the default would read the weights into memory

[[noreturn]] void fail(const std::string& path, const std::string& what, Error error) {
  char code[16];
  std::snprintf(code, sizeof code, "0x%x", static_cast<unsigned>(error));
  const std::string log = take_log();
  throw Failure(path + ": " + what + " (error " + code + ")" + (log.empty() ? "" : ": " + log));
}

std::int64_t likeliest(const executorch::aten::Tensor& logits) {
  const std::int64_t vocabulary = logits.size(logits.dim() - 1);
  const float* const last = logits.const_data_ptr<float>() + (logits.numel() - vocabulary);
  return std::max_element(last, last + vocabulary) - last;
}

}  // namespace

LanguageModel::LanguageModel(const std::string& program, const std::string& weights)
    : path_(program), module_(program, weights.empty() ? std::vector<std::string>{} : std::vector{weights}, kMapped) {
  keep_log();
  if (const Error error = module_.load(kChecked); error != Error::Ok)
    fail(path_, "is no program that can be read", error);
  if (const Error error = module_.load_forward(); error != Error::Ok) {
    fail(path_, weights.empty() ? "cannot run here, without a file of weights" : "cannot run here with these weights",
         error);
  }
  context_ = constants("get_max_seq_len").front();
  vocabulary_ = constants("get_vocab_size").front();
  for (const std::int64_t id : constants("get_eos_ids")) ends_.insert(id);
  read_inputs();
}

void LanguageModel::read_inputs() {
  const auto meta = module_.method_meta("forward");
  if (!meta.ok()) fail(path_, "method forward cannot be read", meta.error());
  const auto position = meta->num_inputs() == 2 ? meta->input_tensor_meta(1) : Error::InvalidProgram;
  if (!position.ok()) fail(path_, "forward takes other inputs than tokens and positions", position.error());
  all_positions_ = position->sizes().size() == 1 && position->sizes()[0] > 1;
  const auto logits = meta->output_tensor_meta(0);
  if (!logits.ok() || logits->scalar_type() != ScalarType::Float || logits->sizes().empty() ||
      logits->sizes()[logits->sizes().size() - 1] != vocabulary_) {
    fail(path_, "forward gives no fp32 logits over the vocabulary", Error::InvalidProgram);
  }
}

std::vector<std::int64_t> LanguageModel::constants(const std::string& method) {
  const auto values = module_.execute(method);
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

std::int64_t LanguageModel::next_token(const std::vector<std::int64_t>& tokens, std::int64_t position) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  if (count == 0) throw Failure("no tokens to run");
  if (position + count > context_) {
    throw Failure(std::to_string(position + count) + " tokens, the context ends at " + std::to_string(context_));
  }
  for (const std::int64_t id : tokens) {
    if (id < 0 || id >= vocabulary_) {
      throw Failure("token " + std::to_string(id) + ", the vocabulary is 0 to " + std::to_string(vocabulary_ - 1));
    }
  }
  std::vector<std::int64_t> ids = tokens;
  std::vector<std::int64_t> where = positions(position, count);
  const auto input = executorch::extension::from_blob(ids.data(), {1, static_cast<SizesType>(count)}, ScalarType::Long);
  const auto at =
      executorch::extension::from_blob(where.data(), {static_cast<SizesType>(where.size())}, ScalarType::Long);
  const auto result = module_.forward({input, at});
  if (!result.ok()) fail(path_, "stopped", result.error());
  return likeliest(result->front().toTensor());
}

}  // namespace runner
