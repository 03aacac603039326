// A plugin of QEMU's user mode that counts the instructions a program executes and prints the sum when it ends:
//
//     c++ -shared -fPIC count_instructions.cpp -o count.so; qemu-aarch64 -plugin ./count.so PROGRAM
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>

// What is used of version 1 of the plugin interface; Debian's packages of QEMU do not ship its header.
extern "C" {
struct qemu_plugin_tb;
struct qemu_info_t;
using qemu_plugin_id_t = std::uint64_t;
constexpr int QEMU_PLUGIN_INLINE_ADD_U64 = 0;

std::size_t qemu_plugin_tb_n_insns(const qemu_plugin_tb* block);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, void (*translated)(qemu_plugin_id_t, qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(qemu_plugin_tb* block, int operation, void* counter,
                                              std::uint64_t amount);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*exiting)(qemu_plugin_id_t, void*), void* argument);

[[gnu::visibility("default")]] int qemu_plugin_version = 1;
[[gnu::visibility("default")]] int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t* info, int argc,
                                                       char** argv);
}

namespace {

std::uint64_t executed = 0;

void count(qemu_plugin_id_t, qemu_plugin_tb* block) {
  qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &executed, qemu_plugin_tb_n_insns(block));
}

void print(qemu_plugin_id_t, void*) { std::fprintf(stderr, "instructions %" PRIu64 "\n", executed); }

}  // namespace

int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t*, int, char**) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, count);
  qemu_plugin_register_atexit_cb(id, print, nullptr);
  return 0;
}
