// Kernels with the packed calling convention of tvm-ffi, well-behaved and not.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <tvm/ffi/c_api.h>

#define KERNEL(name) int __tvm_ffi_##name(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result)

static DLTensor *tensor(const TVMFFIAny *arg) {
  if (arg->type_index == kTVMFFITensor) return (DLTensor *)((char *)arg->v_obj + sizeof(TVMFFIObject));
  return (DLTensor *)arg->v_ptr;
}
static float *data(const TVMFFIAny *arg) { return (float *)tensor(arg)->data; }
static int64_t count(const TVMFFIAny *arg) {
  int64_t n = 1;
  for (int i = 0; i < tensor(arg)->ndim; ++i) n *= tensor(arg)->shape[i];
  return n;
}
// Says what a call came to: its errno, or 0 where it succeeded.
static int say(const TVMFFIAny *out, long outcome) {
  data(out)[0] = outcome < 0 ? (float)errno : 0.0f;
  return 0;
}

KERNEL(noop) { return 0; }
KERNEL(twice) {
  for (int64_t i = 0; i < count(&args[0]); ++i) data(&args[1])[i] = 2 * data(&args[0])[i];
  return 0;
}
// As `twice`, but no two runs give the same bytes: who is answered twice can tell.
KERNEL(unique) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  __tvm_ffi_twice(self, args, num_args, result);
  uint32_t nonce = (uint32_t)now.tv_nsec ^ (uint32_t)now.tv_sec << 24;
  nonce &= ~(1u << 23);  // JSON has no word for NaN
  memcpy(&data(&args[1])[count(&args[1]) - 1], &nonce, sizeof nonce);
  return 0;
}
KERNEL(plus) {
  for (int64_t i = 0; i < count(&args[2]); ++i) data(&args[2])[i] = data(&args[0])[i] + data(&args[1])[i];
  return 0;
}
// Ill-behaved where the input's first value says so; else as `twice`.
KERNEL(segfault) {
  if (data(&args[0])[0] == 13) *(volatile int *)0 = 1;
  return __tvm_ffi_twice(self, args, num_args, result);
}
KERNEL(abort) {
  if (data(&args[0])[0] == 13) abort();
  return __tvm_ffi_twice(self, args, num_args, result);
}
KERNEL(abort_on_zeros) {
  if (data(&args[0])[0] == 0) abort();
  return __tvm_ffi_twice(self, args, num_args, result);
}
#if defined(__x86_64__)
KERNEL(old_call) {
  // getpid of 32-bit x86: another number means another call there.
  if (data(&args[0])[0] == 13) __asm__ volatile("int $0x80" : : "a"(20) : "memory");
  return __tvm_ffi_twice(self, args, num_args, result);
}
#endif
KERNEL(loop) {
  while (data(&args[0])[0] == 13) *(volatile float *)data(&args[0]);
  return __tvm_ffi_twice(self, args, num_args, result);
}
KERNEL(devour) {
  for (long n = 0; data(&args[0])[0] == 13; n += 1) {
    char *block = malloc(1 << 24);
    if (!block) return say(&args[1], -1);
    memset(block, 1, 1 << 24);
    if (n == 1024) return say(&args[1], 0);
  }
  return __tvm_ffi_twice(self, args, num_args, result);
}
KERNEL(gorge) {
  while (data(&args[0])[0] == 13) memset(malloc(1 << 24), 1, 1 << 24);
  return __tvm_ffi_twice(self, args, num_args, result);
}
KERNEL(open_socket) { return say(&args[1], socket(AF_INET, SOCK_STREAM, 0)); }
KERNEL(open_unix_socket) { return say(&args[1], socket(AF_UNIX, SOCK_STREAM, 0)); }
KERNEL(open_pair) { int fds[2]; return say(&args[1], socketpair(AF_UNIX, SOCK_STREAM, 0, fds)); }
KERNEL(read_file) { return say(&args[1], open("/etc/passwd", O_RDONLY)); }
KERNEL(write_file) { return say(&args[1], open("/tmp/edgebundle-was-here", O_CREAT | O_WRONLY, 0600)); }
KERNEL(read_memory_of_agent) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/mem", getppid());
  return say(&args[1], open(path, O_RDONLY));
}
KERNEL(run_program) { return say(&args[1], execl("/bin/true", "true", (char *)0)); }
KERNEL(make_process) {
  pid_t pid = fork();
  if (pid == 0) _exit(0);
  return say(&args[1], pid);
}
KERNEL(kill_agent) { return say(&args[1], kill(syscall(SYS_getpid) + 1, 0)); }
KERNEL(trace) { return say(&args[1], ptrace(PTRACE_TRACEME, 0, 0, 0)); }
KERNEL(mount) { return say(&args[1], mount("none", "/tmp", "tmpfs", 0, "")); }
KERNEL(make_memory_file) { return say(&args[1], syscall(SYS_memfd_create, "x", 0)); }
KERNEL(make_executable) {
  void *page = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return say(&args[1], page == MAP_FAILED ? -1 : 0);
}
KERNEL(make_namespace) { return say(&args[1], unshare(CLONE_NEWUSER)); }
KERNEL(raise_limit) {
  struct rlimit limit = {65536, 65536};
  return say(&args[1], setrlimit(RLIMIT_NOFILE, &limit));
}
KERNEL(burn) {
  clock_t end = clock() + (clock_t)(data(&args[0])[0] * CLOCKS_PER_SEC);
  while (clock() < end) {}
  return 0;
}
KERNEL(refuse_13) {
  if (data(&args[0])[0] != 13) return __tvm_ffi_twice(self, args, num_args, result);
  TVMFFIErrorSetRaisedFromCStr("ValueError", "this kernel refuses");
  return -1;
}
static void *double_in_thread(void *args) {
  __tvm_ffi_twice(0, (const TVMFFIAny *)args, 2, 0);
  return 0;
}
KERNEL(threaded) {
  pthread_t thread;
  if (pthread_create(&thread, 0, double_in_thread, (void *)args)) return say(&args[1], -1);
  pthread_join(thread, 0);
  return 0;
}
