// One row for each instruction set, best first: what it is, what the CPU needs, whether it has proved itself.
#include "gemm/registry.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "moepack/isa.h"

namespace moepack::gemm {

extern const Kernel scalar_kernel;
extern const Kernel avx2_kernel;
extern const Kernel avxvnni_kernel;
extern const Kernel avx512vnni_kernel;
extern const Kernel neondot_kernel;
extern const Kernel neoni8mm_kernel;

namespace {

struct Entry {
  const Kernel* kernel;
  bool (*supported)();
  bool chosen_by_default;
};

#if defined(__x86_64__)
// Two features that __builtin_cpu_supports of clang 14 has no names for. Beyond AVX2, they ask nothing of the system.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

bool has_avxvnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
#endif

#if defined(__aarch64__) && defined(__linux__)
// Bits of the kernel's ABI; older headers have no names for them.
bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  std::size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__aarch64__)
bool has_dotprod() { return false; }
bool has_i8mm() { return false; }
#endif

const Entry kEntries[] = {
#ifdef MOEPACK_HAVE_AVX512VNNI
    {&avx512vnni_kernel,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512vnni") != 0;
     },
     true},
#endif
#ifdef MOEPACK_HAVE_AVXVNNI
    {&avxvnni_kernel, [] { return has_avx2() && has_avxvnni(); }, true},
#endif
#ifdef MOEPACK_HAVE_AVX2
    {&avx2_kernel, has_avx2, true},
#endif
#ifdef MOEPACK_HAVE_NEONI8MM
    {&neoni8mm_kernel, [] { return has_dotprod() && has_i8mm(); }, true},
#endif
#ifdef MOEPACK_HAVE_NEONDOT
    {&neondot_kernel, has_dotprod, true},
#endif
    {&scalar_kernel, [] { return true; }, true},
};

const Entry* find(const char* name) {
  for (const Entry& entry : kEntries)
    if (std::strcmp(entry.kernel->name, name) == 0) return &entry;
  return nullptr;
}

const Kernel* best() {
  for (const Entry& entry : kEntries)
    if (entry.chosen_by_default && entry.supported()) return entry.kernel;
  return &scalar_kernel;
}

Status named(const char* name, const char* source, const Kernel*& kernel) {
  const Entry* entry = find(name);
  if (entry && entry->supported()) {
    kernel = entry->kernel;
    return {};
  }
  char supported[128] = "";
  for (const Entry& other : kEntries) {
    if (!other.supported()) continue;
    if (supported[0]) std::strncat(supported, ", ", sizeof supported - std::strlen(supported) - 1);
    std::strncat(supported, other.kernel->name, sizeof supported - std::strlen(supported) - 1);
  }
  return Status::error("%s=%s: %s; this CPU runs %s", source, name,
                       entry ? "this CPU does not support it" : "no such instruction set", supported);
}

std::atomic<const Kernel*> forced{nullptr};

}  // namespace

Status active_kernel(const Kernel*& kernel) {
  kernel = forced.load(std::memory_order_acquire);
  if (kernel) return {};
  static const char* const variable = std::getenv("MOEPACK_ISA");
  static const Kernel* chosen = nullptr;
  static const Status status = [] {
    if (variable && variable[0]) return named(variable, "MOEPACK_ISA", chosen);
    chosen = best();
    return Status();
  }();
  kernel = chosen;
  return status;
}

}  // namespace moepack::gemm

namespace moepack {

int isa_count() { return static_cast<int>(std::size(gemm::kEntries)); }

IsaInfo isa_info(int i) {
  const gemm::Entry& entry = gemm::kEntries[i];
  return {entry.kernel->name, entry.supported(), entry.chosen_by_default};
}

Status active_isa(const char*& name) {
  const gemm::Kernel* kernel = nullptr;
  Status status = gemm::active_kernel(kernel);
  name = status.ok() ? kernel->name : nullptr;
  return status;
}

Status force_isa(const char* name) {
  const gemm::Kernel* kernel = nullptr;
  if (name) {
    if (Status status = gemm::named(name, "isa", kernel); !status.ok()) return status;
  }
  gemm::forced.store(kernel, std::memory_order_release);
  return {};
}

}  // namespace moepack
