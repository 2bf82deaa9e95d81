/* A processor with AMX, for programs on any x86-64: a handler of SIGILL that does what the instructions do.
 *
 * A processor that has AMX configures and releases tiles itself, because these instructions need no permission; all
 * others are illegal there too, as long as nobody asks the kernel. The frame of a signal says how tiles are configured.
 *
 * Programs load it with LD_PRELOAD. It is strict where hardware faults: an instruction on a tile that was not
 * configured, or of shapes that do not fit each other, ends the program with a line on standard error.
 * `threads_with_tiles` tells in how many threads tiles were not released. TILES_REFUSED=1 makes the kernel refuse
 * permission.
 *
 * Encodings: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, BYTES = 64, TILECFG = 17 };

static __thread struct {
  int configured;
  uint8_t shapes[BYTES];
  int rows[TILES], bytes[TILES];
  uint8_t data[TILES][ROWS][BYTES];
} cpu;

static int asked, permitted;
static _Atomic long products; /* TDPBUSD that were executed */
static _Atomic int configured_threads;
static _Atomic int asked_threads, answered_threads; /* by `threads_with_tiles`, on a processor with AMX */
static int has_amx;

static void fault(const char *what) {
  dprintf(2, "tiles: %s\n", what);
  _exit(70);
}

int asked_for_tiles(void) { return asked; }
long tile_products(void) { return products; }

/* Asks each thread by a signal on a processor with AMX, which does not tell when it releases tiles. */
int threads_with_tiles(void) {
  if (!has_amx) return configured_threads;
  configured_threads = asked_threads = answered_threads = 0;
  DIR *tasks = opendir("/proc/self/task");
  if (tasks == NULL) fault("no list of threads");
  for (struct dirent *task; (task = readdir(tasks)) != NULL;)
    if (task->d_name[0] != '.') asked_threads += syscall(SYS_tgkill, getpid(), atoi(task->d_name), SIGILL) == 0;
  closedir(tasks);
  for (int waited = 0; answered_threads < asked_threads && waited < 2000; ++waited) usleep(1000);
  if (answered_threads < asked_threads) fault("a thread does not say whether it has tiles");
  return configured_threads;
}

/* The general registers in the order of their numbers in instructions. */
static const int ORDER[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

typedef struct {
  uint8_t *address;
  int64_t stride; /* the index register times the scale */
  int length;     /* bytes of ModRM, SIB and displacement */
} Memory;

/* Reads a memory operand. With `rows`, the index is the distance of rows; else it is part of the address. */
static Memory memory(const uint8_t *code, const greg_t *registers, int rex_x, int rex_b, int rows) {
  int mod = code[0] >> 6, rm = code[0] & 7, length = 1;
  int64_t address = 0, stride = 0;
  if (rm == 4) {
    int scale = code[1] >> 6, index = (code[1] >> 3 & 7) | rex_x << 3, base = code[1] & 7;
    length = 2;
    if (index != 4) stride = (int64_t)((uint64_t)registers[ORDER[index]] << scale);
    if (base == 5 && mod == 0) mod = 4; /* a displacement of 32 bits and no base */
    else address = registers[ORDER[base | rex_b << 3]];
  } else if (rm == 5 && mod == 0) {
    int32_t displacement;
    memcpy(&displacement, code + 1, 4);
    return (Memory){(uint8_t *)(intptr_t)(code + 5) + displacement, 0, 5};
  } else {
    address = registers[ORDER[rm | rex_b << 3]];
  }
  if (mod == 1) {
    address += (int8_t)code[length];
    length += 1;
  } else if (mod == 2 || mod == 4) {
    int32_t displacement;
    memcpy(&displacement, code + length, 4);
    address += displacement;
    length += 4;
  }
  if (!rows) address += stride;
  return (Memory){(uint8_t *)address, stride, length};
}

static void configure(const uint8_t *shapes) {
  if (!permitted) fault("ldtilecfg without permission");
  if (shapes[0] != 1) fault("unknown palette");
  for (int i = 0; i < TILES; ++i) {
    cpu.bytes[i] = shapes[16 + 2 * i] | shapes[17 + 2 * i] << 8;
    cpu.rows[i] = shapes[48 + i];
    if (cpu.bytes[i] > BYTES || cpu.rows[i] > ROWS) fault("a tile is too large");
  }
  memcpy(cpu.shapes, shapes, sizeof cpu.shapes);
  memset(cpu.data, 0, sizeof cpu.data);
  configured_threads += !has_amx && !cpu.configured;
  cpu.configured = 1;
}

/* The shapes of tiles when a processor with AMX raised a signal, NULL if they were not configured then. Where they are:
 * Linux, arch/x86/include/uapi/asm/sigcontext.h; Software Developer's Manual, volume 1, 13.4 and 13.5. */
static const uint8_t *shapes_at(const ucontext_t *context) {
  const uint8_t *frame = (const uint8_t *)context->uc_mcontext.fpregs;
  uint32_t magic, size, offset, eax, ecx, edx;
  uint64_t in_use;
  memcpy(&magic, frame + 464, 4);
  memcpy(&size, frame + 480, 4);
  memcpy(&in_use, frame + 512, 8);
  __cpuid_count(0xD, TILECFG, eax, offset, ecx, edx);
  if (magic != 0x46505853 || offset + BYTES > size) fault("a frame without the shapes of tiles");
  return in_use >> TILECFG & 1 ? frame + offset : NULL;
}

/* Takes over what the processor was configured for. Not seen: that data is zero after the same configuration again. */
static void adopt(const uint8_t *shapes) {
  if (shapes == NULL) cpu.configured = 0;
  else if (!cpu.configured || memcmp(shapes, cpu.shapes, sizeof cpu.shapes) != 0) configure(shapes);
}

static void in_use(int tile) {
  if (!cpu.configured || cpu.rows[tile] == 0 || cpu.bytes[tile] == 0) fault("a tile that is not configured");
}

static void check_fit(int sums, int left, int right) {
  in_use(sums), in_use(left), in_use(right);
  if (cpu.rows[sums] != cpu.rows[left] || cpu.bytes[sums] != cpu.bytes[right] ||
      cpu.bytes[left] != 4 * cpu.rows[right] || sums == left || sums == right || left == right)
    fault("tiles that do not fit each other");
}

static void add_products(int sums, int left, int right) {
  check_fit(sums, left, right);
  for (int m = 0; m < cpu.rows[sums]; ++m)
    for (int n = 0; n < cpu.bytes[sums] / 4; ++n) {
      uint32_t sum;
      memcpy(&sum, &cpu.data[sums][m][4 * n], 4);
      for (int k = 0; k < cpu.bytes[left]; ++k)
        sum += (uint32_t)(cpu.data[left][m][k] * (int8_t)cpu.data[right][k / 4][4 * n + k % 4]);
      memcpy(&cpu.data[sums][m][4 * n], &sum, 4);
    }
  ++products;
}

static void on_illegal(int number, siginfo_t *info, void *context) {
  (void)number;
  const uint8_t *shapes = has_amx ? shapes_at(context) : NULL;
  if (has_amx && info->si_code == SI_TKILL) {
    configured_threads += shapes != NULL;
    answered_threads += 1;
    return;
  }
  if (has_amx) adopt(shapes);
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const uint8_t *code = (const uint8_t *)registers[REG_RIP];
  int prefix = code[2] & 3, other = ~(code[2] >> 3) & 15, modrm = code[4];
  int rex_x = !(code[1] >> 6 & 1), rex_b = !(code[1] >> 5 & 1), tile = modrm >> 3 & 7;
  if (code[0] != 0xC4 || (code[1] & 31) != 2 || (code[2] & 0x84) != 0) fault("an instruction that is not of AMX");
  int length = 5;
  if (code[3] == 0x49 && prefix == 0 && modrm == 0xC0) {
    configured_threads -= cpu.configured;
    cpu.configured = 0;
  } else if (code[3] == 0x49 && prefix == 0 && modrm >> 6 != 3) {
    Memory from = memory(code + 4, registers, rex_x, rex_b, 0);
    configure(from.address);
    length = 4 + from.length;
  } else if (code[3] == 0x49 && prefix == 3) {
    in_use(tile);
    memset(cpu.data[tile], 0, sizeof cpu.data[tile]);
  } else if (code[3] == 0x4B && (prefix == 3 || prefix == 2) && (modrm & 7) == 4) {
    Memory at = memory(code + 4, registers, rex_x, rex_b, 1);
    in_use(tile);
    for (int row = 0; row < cpu.rows[tile]; ++row) {
      uint8_t *there = at.address + row * at.stride;
      if (prefix == 2) memcpy(there, cpu.data[tile][row], (size_t)cpu.bytes[tile]);
      else memcpy(cpu.data[tile][row], there, (size_t)cpu.bytes[tile]);
    }
    length = 4 + at.length;
  } else if (code[3] == 0x5E && prefix == 1 && modrm >> 6 == 3) {
    add_products(tile, modrm & 7, other & 7);
  } else {
    fault("an instruction that kernels do not use");
  }
  registers[REG_RIP] += length;
}

/* libc's: kernels' threads block all signals, but not one that a processor would not send. */
int pthread_sigmask(int how, const sigset_t *set, sigset_t *old) {
  int (*next)(int, const sigset_t *, sigset_t *) =
      (int (*)(int, const sigset_t *, sigset_t *))dlsym(RTLD_NEXT, "pthread_sigmask");
  sigset_t others;
  if (set == NULL) return next(how, set, old);
  others = *set;
  if (how != SIG_UNBLOCK) sigdelset(&others, SIGILL);
  return next(how, &others, old);
}

/* libc's: the kernel's answer to a request for permission. */
long syscall(long number, ...) {
  long a[6];
  va_list arguments;
  va_start(arguments, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_arch_prctl && a[0] == 0x1023 && a[1] == 18) {
    asked = 1;
    permitted = getenv("TILES_REFUSED") == NULL;
    errno = EPERM;
    return permitted ? 0 : -1;
  }
  register long r10 __asm__("r10") = a[3];
  register long r8 __asm__("r8") = a[4];
  register long r9 __asm__("r9") = a[5];
  long result;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  if (result < 0 && result > -4096) {
    errno = (int)-result;
    return -1;
  }
  return result;
}

__attribute__((constructor)) static void begin(void) {
  uint32_t eax, ebx, ecx, edx, low = 0, high;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) && ecx & bit_OSXSAVE)
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  has_amx = low >> TILECFG & 1;
  struct sigaction action = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGILL, &action, NULL);
}
