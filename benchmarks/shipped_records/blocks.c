/* A QEMU user-mode plugin that counts how often each translated block runs between marks of the guest.
 *
 * A system call with the number MARK is a mark, after which counting starts again from zero. If its first argument is
 * 1, the plugin first writes the counts since the last mark as one line to the file named by BLOCKS_OUT: the label
 * (second argument), the weight as a fraction (third and fourth), then address:instructions:times for each block.
 * It declares the few plugin functions that it uses, because Debian ships no header for plugins.
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
enum { INLINE_ADD_U64 = 0, MARK = 24301, SLOTS = 1 << 16 };

extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t,
                                                  void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *ptr, uint64_t imm);
extern void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t,
                                                 void (*)(qemu_plugin_id_t, unsigned, int64_t, uint64_t,
                                                          uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                                                          uint64_t, uint64_t));

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static struct {
  uint64_t address, instructions, times;
} slots[SLOTS];
static FILE *out;

static void on_translate(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
  (void)id;
  uint64_t address = qemu_plugin_tb_vaddr(tb), instructions = qemu_plugin_tb_n_insns(tb);
  size_t at = (address >> 2) * 2654435761u % SLOTS;
  for (size_t tried = 0; slots[at].address && tried < SLOTS; tried++) {
    if (slots[at].address == address && slots[at].instructions == instructions) break;
    at = (at + 1) % SLOTS;
  }
  slots[at].address = address;
  slots[at].instructions = instructions;
  qemu_plugin_register_vcpu_tb_exec_inline(tb, INLINE_ADD_U64, &slots[at].times, 1);
}

static void on_call(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t write, uint64_t label,
                    uint64_t all, uint64_t run, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
  (void)id, (void)cpu, (void)a5, (void)a6, (void)a7, (void)a8;
  if (number != MARK) return;
  if (write && out) fprintf(out, "%" PRIu64 " %" PRIu64 " %" PRIu64, label, all, run);
  for (size_t i = 0; i < SLOTS; i++) {
    if (!slots[i].times) continue;
    if (write && out)
      fprintf(out, " %" PRIx64 ":%" PRIu64 ":%" PRIu64, slots[i].address, slots[i].instructions, slots[i].times);
    slots[i].times = 0;
  }
  if (write && out) fputc('\n', out), fflush(out);
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc,
                                                               char **argv) {
  (void)info, (void)argc, (void)argv;
  const char *path = getenv("BLOCKS_OUT");
  out = path ? fopen(path, "w") : NULL;
  qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
  qemu_plugin_register_vcpu_syscall_cb(id, on_call);
  return 0;
}
