// Runs the method `forward` of a program once on a matrix of numbers. The bytes it writes can be compared with those of
// the machine that exported the program: a device computes a packed layer bit for bit as its export host does.
//
//     moepack_forward program.pte input output [weights.ptd]
//
// `input` holds fp32 [T, D], D as in the program; `output` gets the first result.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::Module;

int fail(const std::string& what) {
  std::fprintf(stderr, "moepack_forward: %s\n", what.c_str());
  return 1;
}

std::vector<char> read_bytes(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool write_bytes(const char* path, const executorch::aten::Tensor& tensor) {
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  return file.flush().good();
}

int forward(Module& module, const char* input, const char* output) {
  const auto meta = module.method_meta("forward");
  if (!meta.ok()) return fail("no program with a method forward");
  const auto x = meta->num_inputs() == 1 ? meta->input_tensor_meta(0) : executorch::runtime::Error::InvalidProgram;
  if (!x.ok() || x->sizes().size() != 2 || x->scalar_type() != ScalarType::Float || x->sizes()[1] < 1)
    return fail("forward takes something else than one fp32 matrix");
  std::vector<char> bytes = read_bytes(input);
  const std::size_t row = static_cast<std::size_t>(x->sizes()[1]) * sizeof(float);
  if (bytes.empty() || bytes.size() % row != 0)
    return fail(std::string(input) + ": " + std::to_string(bytes.size()) + " bytes, expected rows of " +
                std::to_string(row));
  const auto tensor = executorch::extension::from_blob(
      bytes.data(), {static_cast<SizesType>(bytes.size() / row), x->sizes()[1]}, ScalarType::Float);
  const auto result = module.forward(tensor);
  if (!result.ok()) return fail("forward stopped");
  if (result->empty() || !result->front().isTensor()) return fail("forward returns no tensor");
  if (!write_bytes(output, result->front().toTensor())) return fail(std::string(output) + ": cannot be written");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) return fail("usage: moepack_forward program.pte input output [weights.ptd]");
  Module module(argv[1], std::vector<std::string>(argv + 4, argv + argc), Module::LoadMode::Mmap);
  return forward(module, argv[2], argv[3]);
}
