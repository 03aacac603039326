// Made layers of experts and batches of tokens, the same on every machine.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "moepack/ffn.h"
#include "moepack/packed.h"

namespace moepack::selftest {

struct Dimensions {
  std::int64_t D, F, E, K;
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<unsigned>(n)); }
  float normal() { return normal_(engine_); }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

struct Layer {
  Layer(const Dimensions& d, const ExpertAttributes& a, Random& random);

  std::vector<std::uint8_t> w13, w2;
  ExpertTensors tensors;
};

struct Batch {
  Batch(const Dimensions& d, std::int64_t tokens, Random& random);

  std::vector<float> x;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
};

ExpertAttributes attributes(std::string_view scheme, std::string_view activation, std::string_view layout = "moepack");

// Chooses an instruction set, or ends the program with the reason why not.
void force(const std::string& isa);

// The operator on tokens [first, first + tokens) of a batch, with all the memory it needs. An error ends the program.
class Call {
 public:
  Call(const Dimensions& d, const ExpertAttributes& a, const Layer& layer, const Batch& batch, std::int64_t first,
       std::int64_t tokens, int thread_count);

  void operator()();
  std::vector<float> on(const std::string& isa);
  const std::vector<float>& out() const { return out_; }

 private:
  Shape shape_;
  ExpertAttributes attributes_;
  ExpertTensors tensors_;
  const float* x_;
  const std::int64_t* ids_;
  const float* weights_;
  ParallelFor parallel_;
  std::vector<std::uint8_t> memory_;
  std::uint8_t* workspace_;
  std::vector<float> out_;
};

bool same(const std::vector<float>& a, const float* b);

}  // namespace moepack::selftest
