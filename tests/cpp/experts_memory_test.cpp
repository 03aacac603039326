// Whose memory a call touches: none of its own, the workspace it asked for, blobs wherever they lie.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "made.h"

static std::atomic<long> allocations{0};

// Not inlined: gcc would take the malloc inside for one that a delete must not see.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace moepack {
namespace {

using Floats = std::vector<float>;
using made::experts;
using made::layer;
using made::Layer;
using made::Routing;
using made::routing;

Floats activations(std::int64_t T, std::int64_t D) { return made::Random(61).floats(T * D); }

TEST(ExpertsMemory, BlobsAtAnyAddress) {
  const Layer l = layer(*find_scheme("int4-g32"), 48, 48, 2);
  const Routing r = routing(3, 2, 2);
  const Floats x = activations(3, 48), expected = experts(l, x, r);
  for (const std::size_t shift : {1, 16, 33}) {
    Layer moved = l;
    moved.w13.insert(moved.w13.begin(), shift, 0);
    moved.w2.insert(moved.w2.begin(), shift, 0);
    ExpertTensors tensors = moved.tensors();
    tensors.packed_w13 += shift;
    tensors.packed_w2 += shift;
    for (const std::string& isa : made::supported_isas()) {
      const made::ForcedIsa forced(isa);
      Floats out(x.size());
      made::Workspace workspace(experts_workspace_bytes(l.shape(3, 2), l.attributes(), 1));
      ASSERT_TRUE(quantized_experts(l.shape(3, 2), l.attributes(), tensors, x.data(), DType::f32, r.ids.data(),
                                    r.weights.data(), out.data(), workspace.base(), serial())
                      .ok());
      EXPECT_TRUE(made::same(out, expected)) << isa;
    }
  }
}

TEST(ExpertsMemory, ACallAllocatesNothing) {
  const Layer l = layer(*find_scheme("int4-g32"), 48, 160, 4, true);
  const Shape shape = l.shape(40, 2);
  const Routing r = routing(40, 2, 4);
  const Floats x = activations(40, 48);
  Floats out(x.size());
  made::Workspace workspace(experts_workspace_bytes(shape, l.attributes(), 1));
  const ExpertAttributes attributes = l.attributes();
  const long before = allocations;
  const Status status = quantized_experts(shape, attributes, l.tensors(), x.data(), DType::f32, r.ids.data(),
                                          r.weights.data(), out.data(), workspace.base(), serial());
  EXPECT_EQ(allocations - before, 0);
  EXPECT_TRUE(status.ok());
}

TEST(ExpertsMemory, ACallWithTheRouterAllocatesNothing) {
  const Layer l = layer(*find_scheme("int8-g64"), 48, 160, 4, true);
  const Shape shape = l.shape(40, 2);
  const ExpertAttributes attributes = l.attributes();
  RoutingAttributes routing;
  routing.score_func = "softmax_all";
  routing.group_score = "max";
  routing.router_dtype = "bfloat16";
  ASSERT_TRUE(check_routing(shape, routing).ok());
  const Floats x = activations(40, 48), gate = activations(4, 48);
  Floats out(x.size());
  made::Workspace workspace(ffn_workspace_bytes(shape, attributes, 1));
  const long before = allocations;
  const Status status = quantized_moe_ffn(shape, routing, {nullptr, gate.data()}, attributes, l.tensors(), x.data(),
                                          DType::f32, out.data(), workspace.base(), serial());
  EXPECT_EQ(allocations - before, 0);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(ExpertsMemory, WorkspaceDoesNotGrowWithTheTokens) {
  const Layer l = layer(*find_scheme("int4-g32"), 48, 160, 4);
  const auto bytes = [&](std::int64_t T) { return experts_workspace_bytes(l.shape(T, 4), l.attributes(), 4); };
  EXPECT_EQ(bytes(1024), bytes(1000000));
  EXPECT_LT(bytes(1), bytes(1024));
}

// Zero pages that cost nothing until they are touched.
class Sparse {
 public:
  explicit Sparse(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)),
        memory_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Sparse() {
    if (ok()) munmap(memory_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  bool ok() const { return memory_ != MAP_FAILED; }
  std::uint8_t* data() const { return static_cast<std::uint8_t*>(memory_); }

 private:
  std::size_t bytes_;
  void* memory_;
};

TEST(ExpertsMemory, BeyondFourGigabytesTheLastExpertIsRight) {
  const Layer one = layer(*find_scheme("int8-g32"), 1024, 1024, 1);
  const std::int64_t E = (std::int64_t{5} << 30) / one.bytes2;
  const Sparse w13(E * one.bytes13), w2(E * one.bytes2);
  if (!w13.ok() || !w2.ok()) GTEST_SKIP() << "no address space for it";
  std::copy(one.w13.begin(), one.w13.end(), w13.data() + (E - 1) * one.bytes13);
  std::copy(one.w2.begin(), one.w2.end(), w2.data() + (E - 1) * one.bytes2);

  const Shape shape{2, 1024, 1024, E, 1};
  const Floats x = activations(2, 1024);
  const std::vector<std::int64_t> ids = {E - 1, E - 1};
  const Floats weights = {0.5f, 1.0f};
  Floats out(x.size());
  made::Workspace workspace(experts_workspace_bytes(shape, one.attributes(), 1));
  const ExpertTensors tensors{w13.data(), w2.data(), one.bytes13, one.bytes2};
  const Status status = quantized_experts(shape, one.attributes(), tensors, x.data(), DType::f32, ids.data(),
                                          weights.data(), out.data(), workspace.base(), serial());
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(made::same(out, experts(one, x, {2, 1, {0, 0}, weights})));
}

}  // namespace
}  // namespace moepack
