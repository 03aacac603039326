// The values of a kernel call as a program file would make them, to be replaced one by one.
#pragma once

#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/memory_allocator.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <list>
#include <string>
#include <utility>
#include <vector>

#include "../made.h"

namespace moepack::made {

class Arguments {
 public:
  using EValue = executorch::runtime::EValue;
  using Sizes = std::vector<executorch::aten::SizesType>;

  std::vector<EValue>& values() { return values_; }

  void set(std::size_t position, void* data, Sizes sizes, executorch::aten::ScalarType type) {
    set(position, executorch::extension::make_tensor_ptr(std::move(sizes), data, type));
  }
  void set(std::size_t position, const executorch::extension::TensorPtr& tensor) {
    tensors_.push_back(tensor);
    values_[position] = EValue(*tensor);
  }
  void set_text(std::size_t position, const char* text) {
    texts_.emplace_back(text);
    text_refs_.emplace_back(texts_.back().data(), texts_.back().size());
    values_[position] = EValue(&text_refs_.back());
  }
  void add(void* data, Sizes sizes, executorch::aten::ScalarType type) {
    values_.emplace_back();
    set(values_.size() - 1, data, std::move(sizes), type);
  }
  void add_text(const char* text) {
    values_.emplace_back();
    set_text(values_.size() - 1, text);
  }
  void* data(std::size_t position) { return values_[position].toTensor().mutable_data_ptr(); }

  // Calls a kernel with the first `count` values and so many bytes for its temporary memory.
  executorch::runtime::Error run(executorch::runtime::OpFunction kernel, std::size_t count = SIZE_MAX,
                                 std::size_t memory = 1 << 20) {
    std::vector<EValue*> pointers;
    for (EValue& value : values_)
      if (pointers.size() < count) pointers.push_back(&value);
    std::vector<std::uint8_t> scratch(memory);
    executorch::runtime::MemoryAllocator allocator(static_cast<std::uint32_t>(memory), scratch.data());
    executorch::runtime::KernelRuntimeContext context(nullptr, &allocator);
    kernel(context, {pointers.data(), pointers.size()});
    return context.failure_state();
  }

 private:
  std::list<executorch::extension::TensorPtr> tensors_;
  std::list<std::string> texts_;
  std::list<executorch::aten::ArrayRef<char>> text_refs_;
  std::vector<EValue> values_;
};

}  // namespace moepack::made
