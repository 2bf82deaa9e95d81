/* A QEMU user-mode plugin with a model of data caches: what each stretch of a program executes, and what misses.
 *
 * It works between the first and the last mark of the guest (system calls with the number MARK). A stretch ends at a
 * mark and after CACHES_SLICE instructions. Each stretch is one line of the file CACHES_OUT: the label of the last
 * mark, the counts, then block:times for each translated block that ran. A mark is a line `mark LABEL`. At the end a
 * line `block NUMBER INSTRUCTIONS BYTES` describes each block that ran, with its machine code in hexadecimal.
 *
 * CACHES_LEVELS is `BYTES:WAYS` of the L1, then one or more variants of what is behind it, each after a `;`, with its
 * levels separated by `,`. All variants see the same misses of the L1. Caches have lines of LINE bytes, evict the least
 * recently used line, allocate on writes and write back. Addresses are virtual. The first misses of a stream (lines in
 * order, up or down) are told from later ones, for which a prefetcher has asked already. A later miss of a stream of
 * writes is not read from memory if CACHES_READ_ALLOCATE is set: cores of ARM stop to allocate then.
 *
 * It declares the few plugin functions that it uses, because Debian ships no header for plugins.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { INLINE_ADD_U64 = 0, NO_REGISTERS = 0, READ_AND_WRITE = 3, MARK = 24302 };

extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t,
                                                  void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
extern size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *ptr, uint64_t imm);
extern void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *,
                                             void (*)(unsigned, uint32_t, uint64_t, void *), int flags, int rw,
                                             void *user);
extern unsigned qemu_plugin_mem_size_shift(uint32_t);
extern bool qemu_plugin_mem_is_store(uint32_t);
extern void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t,
                                                 void (*)(qemu_plugin_id_t, unsigned, int64_t, uint64_t,
                                                          uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                                                          uint64_t, uint64_t));
extern void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, void *), void *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

enum { LINE_BITS = 6, LINE = 1 << LINE_BITS, LEVELS = 4, VARIANTS = 4, STREAMS = 16, SLOTS = 1 << 21 };

typedef struct {
  uint64_t sets, ways; /* any number of sets: caches of 3 MiB exist */
  uint64_t *lines;     /* set by set, the last used first: line << 1 | dirty, or EMPTY */
} Cache;
#define EMPTY UINT64_MAX

typedef struct {
  int levels;
  Cache caches[LEVELS];
  /* for each level: misses that wait, misses of streams; at the end bytes to and from memory */
  uint64_t waiting[LEVELS], streamed[LEVELS], read, written;
} Variant;

static Cache first;
static Variant variants[VARIANTS];
static int variant_count, read_allocate;
static uint64_t accesses, waiting, streamed, evicted; /* of the L1 */
static struct {
  uint64_t last, used;
  int step, length;
} streams[STREAMS];
static uint64_t clock_of_streams;

static struct {
  uint64_t address, instructions, times, size;
  uint8_t *code;
  int ran;
} slots[SLOTS];
static uint32_t used_slots[SLOTS];
static size_t used_count;

static uint64_t executed, began, slice = 1000000;
static int64_t label = -1; /* of the last mark; nothing is counted before the first */
static uint64_t last_line = EMPTY;
static int last_dirty;
static FILE *out;

/* Moves a line to the front of its set, or puts it there; returns whether it was there. `victim` becomes the evicted
 * line if it was dirty, else EMPTY. */
static inline int touch(Cache *cache, uint64_t line, int dirty, uint64_t *victim) {
  uint64_t *set = cache->lines + (line % cache->sets) * cache->ways;
  uint64_t i, found = EMPTY;
  *victim = EMPTY;
  for (i = 0; i < cache->ways; i++)
    if (set[i] >> 1 == line && set[i] != EMPTY) {
      found = set[i];
      break;
    }
  int hit = i < cache->ways;
  if (!hit) {
    i = cache->ways - 1;
    if (set[i] != EMPTY && (set[i] & 1)) *victim = set[i] >> 1;
    found = line << 1;
  }
  memmove(set + 1, set, i * sizeof *set);
  set[0] = found | (uint64_t)dirty;
  return hit;
}

/* Writes back a dirty line of the level before `level`. */
static void write_back(Variant *v, int level, uint64_t line) {
  for (; level < v->levels; level++) {
    uint64_t victim;
    touch(&v->caches[level], line, 1, &victim);
    if (victim == EMPTY) return;
    line = victim;
  }
  v->written += LINE;
}

static void beyond(Variant *v, uint64_t line, int in_stream, int store) {
  for (int level = 0; level < v->levels; level++) {
    uint64_t victim;
    int hit = touch(&v->caches[level], line, 0, &victim);
    if (victim != EMPTY) write_back(v, level + 1, victim);
    if (hit) return;
    *(in_stream ? &v->streamed[level] : &v->waiting[level]) += 1;
  }
  if (!(store && in_stream && read_allocate)) v->read += LINE;
}

/* Whether the missing line continues a stream of at least two lines. */
static int continues_a_stream(uint64_t line) {
  int oldest = 0;
  clock_of_streams++;
  for (int i = 0; i < STREAMS; i++) {
    int64_t distance = (int64_t)(line - streams[i].last);
    if (streams[i].length && (distance == 1 || distance == -1) &&
        (streams[i].length == 1 || distance == streams[i].step)) {
      streams[i].step = (int)distance;
      streams[i].last = line;
      streams[i].used = clock_of_streams;
      return ++streams[i].length > 2;
    }
    if (streams[i].used < streams[oldest].used) oldest = i;
  }
  streams[oldest].last = line;
  streams[oldest].length = 1;
  streams[oldest].used = clock_of_streams;
  return 0;
}

static void write_counts(void) {
  if (label >= 0 && executed != began) {
    fprintf(out, "%" PRId64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64, label, executed - began,
            accesses, waiting, streamed, evicted);
    for (int i = 0; i < variant_count; i++) {
      Variant *v = &variants[i];
      fprintf(out, " |");
      for (int level = 0; level < v->levels; level++)
        fprintf(out, " %" PRIu64 " %" PRIu64, v->waiting[level], v->streamed[level]);
      fprintf(out, " %" PRIu64 " %" PRIu64, v->read, v->written);
    }
    fprintf(out, " |");
  }
  for (size_t i = 0; i < used_count; i++) {
    uint32_t at = used_slots[i];
    if (!slots[at].times) continue;
    if (label >= 0 && executed != began) {
      fprintf(out, " %" PRIu32 ":%" PRIu64, at, slots[at].times);
      slots[at].ran = 1;
    }
    slots[at].times = 0;
  }
  if (label >= 0 && executed != began) fputc('\n', out);
  accesses = waiting = streamed = evicted = 0;
  for (int i = 0; i < variant_count; i++) {
    memset(variants[i].waiting, 0, sizeof variants[i].waiting);
    memset(variants[i].streamed, 0, sizeof variants[i].streamed);
    variants[i].read = variants[i].written = 0;
  }
  began = executed;
}

static void access_line(uint64_t line, int store) {
  accesses++;
  if (line == last_line && (!store || last_dirty)) return;
  uint64_t victim;
  int hit = touch(&first, line, store, &victim);
  last_dirty = (line == last_line && last_dirty) || store;
  last_line = line;
  if (hit) return;
  if (victim != EMPTY) {
    evicted++;
    for (int i = 0; i < variant_count; i++) write_back(&variants[i], 0, victim);
  }
  int in_stream = continues_a_stream(line);
  *(in_stream ? &streamed : &waiting) += 1;
  for (int i = 0; i < variant_count; i++) beyond(&variants[i], line, in_stream, store);
}

static void on_access(unsigned cpu, uint32_t info, uint64_t address, void *unused) {
  (void)cpu, (void)unused;
  if (label < 0) return;
  if (executed - began >= slice) write_counts();
  int store = qemu_plugin_mem_is_store(info);
  access_line(address >> LINE_BITS, store);
  uint64_t at = address & (LINE - 1);
  if (at > LINE - 16 && at + (1u << qemu_plugin_mem_size_shift(info)) > LINE)
    access_line((address >> LINE_BITS) + 1, store);
}

static size_t slot_of(const struct qemu_plugin_tb *tb) {
  uint64_t address = qemu_plugin_tb_vaddr(tb), instructions = qemu_plugin_tb_n_insns(tb);
  size_t at = (address * 11400714819323198485u ^ instructions) >> 20 & (SLOTS - 1);
  while (slots[at].address && !(slots[at].address == address && slots[at].instructions == instructions))
    at = (at + 1) % SLOTS;
  if (slots[at].address) return at;
  if (used_count >= SLOTS / 2) {
    fprintf(stderr, "caches.c: expected at most %d blocks, got more\n", SLOTS / 2);
    exit(1);
  }
  used_slots[used_count++] = (uint32_t)at;
  slots[at].address = address;
  slots[at].instructions = instructions;
  for (size_t i = 0; i < instructions; i++)
    slots[at].size += qemu_plugin_insn_size(qemu_plugin_tb_get_insn(tb, i));
  uint8_t *code = slots[at].code = malloc(slots[at].size);
  for (size_t i = 0; i < instructions; i++) {
    const struct qemu_plugin_insn *each = qemu_plugin_tb_get_insn(tb, i);
    memcpy(code, qemu_plugin_insn_data(each), qemu_plugin_insn_size(each));
    code += qemu_plugin_insn_size(each);
  }
  return at;
}

static void on_translate(qemu_plugin_id_t id, struct qemu_plugin_tb *tb) {
  (void)id;
  size_t at = slot_of(tb);
  qemu_plugin_register_vcpu_tb_exec_inline(tb, INLINE_ADD_U64, &executed, slots[at].instructions);
  qemu_plugin_register_vcpu_tb_exec_inline(tb, INLINE_ADD_U64, &slots[at].times, 1);
  for (size_t i = 0; i < slots[at].instructions; i++) {
    struct qemu_plugin_insn *each = qemu_plugin_tb_get_insn(tb, i);
    /* one callback: with one for reads and one for writes, qemu 7.2 calls the last for both */
    qemu_plugin_register_vcpu_mem_cb(each, on_access, NO_REGISTERS, READ_AND_WRITE, NULL);
  }
}

static void on_call(qemu_plugin_id_t id, unsigned cpu, int64_t number, uint64_t mark, uint64_t a2, uint64_t a3,
                    uint64_t a4, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
  (void)id, (void)cpu, (void)a2, (void)a3, (void)a4, (void)a5, (void)a6, (void)a7, (void)a8;
  if (number != MARK) return;
  write_counts();
  label = (int64_t)mark;
  fprintf(out, "mark %" PRId64 "\n", label);
}

static void on_exit_guest(qemu_plugin_id_t id, void *unused) {
  (void)id, (void)unused;
  for (size_t i = 0; i < used_count; i++) {
    uint32_t at = used_slots[i];
    if (!slots[at].ran) continue;
    fprintf(out, "block %" PRIu32 " %" PRIu64 " ", at, slots[at].instructions);
    for (uint64_t byte = 0; byte < slots[at].size; byte++) fprintf(out, "%02x", slots[at].code[byte]);
    fputc('\n', out);
  }
  fclose(out);
}

/* Reads BYTES:WAYS at `text`; returns what follows, or NULL. */
static const char *read_cache(const char *text, Cache *cache) {
  char *end;
  uint64_t bytes = strtoull(text, &end, 10);
  if (*end != ':') return NULL;
  cache->ways = strtoull(end + 1, &end, 10);
  if (!cache->ways || bytes % (LINE * cache->ways) || !bytes) return NULL;
  cache->sets = bytes / LINE / cache->ways;
  cache->lines = malloc(bytes / LINE * sizeof *cache->lines);
  if (!cache->lines) return NULL;
  memset(cache->lines, 0xff, bytes / LINE * sizeof *cache->lines);
  return end;
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc,
                                                               char **argv) {
  (void)info, (void)argc, (void)argv;
  const char *path = getenv("CACHES_OUT"), *levels = getenv("CACHES_LEVELS"), *every = getenv("CACHES_SLICE");
  if (!path || !levels || !(out = fopen(path, "w"))) return 1;
  if (every) slice = strtoull(every, NULL, 10);
  read_allocate = getenv("CACHES_READ_ALLOCATE") != NULL;
  levels = read_cache(levels, &first);
  while (levels && *levels == ';' && variant_count < VARIANTS) {
    Variant *v = &variants[variant_count++];
    do levels = v->levels < LEVELS ? read_cache(levels + 1, &v->caches[v->levels++]) : NULL;
    while (levels && *levels == ',');
  }
  if (!levels || *levels || !variant_count) {
    fprintf(stderr, "caches.c: expected CACHES_LEVELS as BYTES:WAYS;BYTES:WAYS,..., got another text\n");
    return 1;
  }
  qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
  qemu_plugin_register_vcpu_syscall_cb(id, on_call);
  qemu_plugin_register_atexit_cb(id, on_exit_guest, NULL);
  return 0;
}
