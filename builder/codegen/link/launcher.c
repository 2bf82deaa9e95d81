/* The part of every mod.so that is not a kernel: parallel launch, here, and workspace, in workspace.c.
 *
 * TVM's code calls four functions through weak pointers that a loader should fill. This file fills them when the
 * library is loaded, so a device needs tvm-ffi but not TVM. A version script keeps the pointers local, so no other
 * loader overwrites them: the launcher that is measured is the launcher that ships.
 *
 * Promises
 * - The number of threads of a launch, including the calling thread, is the one that __tvm_ffi_edge_set_threads set,
 *   else EDGE_NUM_THREADS, else the number of CPUs in the affinity mask at the first launch. It reads no files, so it
 *   knows neither cores nor quotas: the executor does, and sets the number. New threads inherit their creator's affinity.
 * - After a launch, workers spin for SPIN_US, so that the next kernel finds them awake; then they sleep.
 * - Of two threads of the pool on one processor, one moves to a free one, if there is one, or at least does not spin.
 *   Moving narrows its affinity to the processors that no other thread of the pool is on.
 * - A launch never waits for a thread that has not started: the caller runs the tasks that no worker has claimed.
 * - A launch inside a launch, or while another thread is launching, runs only on the calling thread.
 * - Where kernels use AMX (EDGE_TILES), loading the library asks for the permission. If the system refuses it,
 *   __tvm_ffi_edge_set_threads and __tvm_ffi_edge_threads fail, one of which every loader calls.
 * - Unloading the library leaves no thread and no memory behind; a forked child starts without workers.
 *
 * The signatures are those of TVM's c_backend_api.h.
 */
#define _GNU_SOURCE
#include "launcher.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

enum { PAUSES = 32 };
/* Longer than most kernels that run on one thread: to wake a sleeping thread takes 50 us on some virtual machines. */
static const int64_t SPIN_US = 500;

typedef struct {
  void *sync_handle;
  int32_t num_task;
} ParallelGroupEnv;
typedef int (*ParallelLambda)(int task_id, ParallelGroupEnv *env, void *cdata);

/* ---- threads ---- */

/* A thread claims a task by adding 1 to a ticket: launch << 32 | tasks << 16 | next task. That single word holds the
 * number of tasks of the claim's own launch, so a late worker claims nothing even if the next launch is being set up.
 * A launch does not end before its claimed tasks are done, so lambda, cdata and env belong to the claim's launch. */
typedef struct {
  pthread_mutex_t launching; /* held by the thread that launches, or that changes the pool */
  pthread_t threads[MAX_THREADS];
  int wanted;  /* threads of a launch, 0 if not set yet */
  int workers; /* threads alive besides the caller */
  ParallelLambda lambda;
  void *cdata;
  ParallelGroupEnv env;
  _Alignas(CACHE_LINE) atomic_ullong ticket;
  _Alignas(CACHE_LINE) atomic_uint launches; /* a new value is a new launch; futex */
  atomic_int sleepers;
  atomic_bool stopping;
  _Alignas(CACHE_LINE) atomic_int pending; /* tasks not yet done; futex */
  atomic_int caller_sleeps;
  atomic_int failed_tasks;
  atomic_int caller; /* its thread id */
  _Alignas(CACHE_LINE) atomic_int processors[MAX_THREADS]; /* of the caller, then of each worker; -1 while it sleeps */
} Pool;

static Pool pool = {.launching = PTHREAD_MUTEX_INITIALIZER};

void edge_raise(const char *kind, const char *message) {
  const char *parts[] = {message};
  TVMFFIErrorSetRaisedFromCStrParts(kind, parts, 1);
}

static inline void pause_cpu(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ volatile("isb"); /* waits some ten cycles; "yield" does nothing on these cores */
#else
  atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Makes results and operands below the smallest normal number zero (1), or computes with them (0), in this thread.
   Returns how it was. Some processors take a hundred cycles longer for such denormal numbers. */
static int flush_denormals(int on) {
#if defined(__x86_64__)
  const unsigned flush = 0x8040; /* MXCSR: FTZ and DAZ */
  unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(on ? before | flush : before & ~flush);
  return (before & flush) == flush;
#elif defined(__aarch64__)
  const uint64_t flush = 1 << 24; /* FPCR: FZ */
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(on ? before | flush : before & ~flush));
  return (before & flush) != 0;
#elif defined(__arm__)
  const uint32_t flush = 1 << 24; /* FPSCR: FZ, for VFP; NEON always flushes */
  uint32_t before;
  __asm__ volatile("vmrs %0, fpscr" : "=r"(before));
  __asm__ volatile("vmsr fpscr, %0" : : "r"(on ? before | flush : before & ~flush));
  return (before & flush) != 0;
#else
  (void)on;
  return 0;
#endif
}

static void futex_wait(void *word, unsigned value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(void *word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* A thread that spins. `until_ns` is 0 until the clock is first read. */
typedef struct {
  int rounds;
  int64_t until_ns;
} Spin;

/* Pauses, and returns whether the thread may spin on; it may for SPIN_US. Reads the clock once in PAUSES rounds. */
static inline int spins_on(Spin *spin) {
  pause_cpu();
  if (++spin->rounds % PAUSES != 0) return 1;
  int64_t now = now_ns();
  if (spin->until_ns == 0) spin->until_ns = now + SPIN_US * 1000;
  return now < spin->until_ns;
}

/* Runs tasks until there are none left to claim. Returns the first failure of the tasks that it ran itself, or 0. */
static int work(void) {
  int first_failure = 0;
  for (;;) {
    uint64_t claim = atomic_fetch_add(&pool.ticket, 1);
    uint64_t tasks = claim >> 16 & 0xffff, task = claim & 0xffff;
    if (task >= tasks) return first_failure;
    int status = pool.lambda((int)task, &pool.env, pool.cdata);
    if (status != 0) {
      atomic_fetch_add_explicit(&pool.failed_tasks, 1, memory_order_relaxed);
      if (first_failure == 0) first_failure = status;
    }
    if (atomic_fetch_sub(&pool.pending, 1) == 1 && atomic_load(&pool.caller_sleeps))
      futex_wake(&pool.pending, 1);
  }
}

/* Notes on which processor thread number `self` is; the caller is number 0, the workers follow. */
static int note_processor(int self) {
  int here = sched_getcpu();
  atomic_store_explicit(&pool.processors[self], here, memory_order_relaxed);
  return here;
}

/* Whether one of the threads from `first` to before `last` is on processor `here`. */
static int is_crowded(int here, int first, int last) {
  for (int i = first; i < last; ++i)
    if (atomic_load_explicit(&pool.processors[i], memory_order_relaxed) == here) return 1;
  return 0;
}

/* The calling thread's id, which Linux is asked for once in each thread: it takes 200 ns on some virtual machines. */
static pthread_key_t id_key;
static int id_key_made;

static int thread_id(void) {
  intptr_t id = id_key_made ? (intptr_t)pthread_getspecific(id_key) : 0;
  if (id == 0) {
    id = syscall(SYS_gettid);
    if (id_key_made) pthread_setspecific(id_key, (void *)id);
  }
  return (int)id;
}

/* Moves worker `self` to processors of the caller on which no other thread of the pool is. Linux may leave two threads
 * on one processor for tens of milliseconds while another idles, and wakes a thread where it last ran. Returns whether
 * it moved; the agent's sandbox does not allow it. */
static int step_aside(int self) {
  cpu_set_t free;
  if (sched_getaffinity(atomic_load(&pool.caller), sizeof free, &free) != 0) return 0;
  for (int i = 0; i < pool.wanted; ++i) {
    int other = atomic_load_explicit(&pool.processors[i], memory_order_relaxed);
    if (i != self && other >= 0 && other < CPU_SETSIZE) CPU_CLR(other, &free);
  }
  if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free) != 0) return 0;
  note_processor(self);
  return 1;
}

static void *worker(void *argument) {
  enum { PATIENCE = 64 }; /* launches until a move is tried again where none was possible */
  int self = (int)(intptr_t)argument, patience = 0, crowded = 0;
  unsigned seen = 0;
  flush_denormals(1);
  for (;;) {
    unsigned launches = seen;
    Spin spin = {0};
    while (launches == seen && !crowded && spins_on(&spin))
      launches = atomic_load_explicit(&pool.launches, memory_order_acquire);
    while (launches == seen) {
      atomic_store_explicit(&pool.processors[self], -1, memory_order_relaxed);
      atomic_fetch_add(&pool.sleepers, 1);
      if (atomic_load(&pool.launches) == seen) futex_wait(&pool.launches, seen);
      atomic_fetch_sub(&pool.sleepers, 1);
      launches = atomic_load_explicit(&pool.launches, memory_order_acquire);
    }
    seen = launches;
    if (atomic_load(&pool.stopping)) return NULL;
    crowded = is_crowded(note_processor(self), 0, self);
    if (crowded && --patience < 0) {
      crowded = !step_aside(self);
      patience = crowded ? PATIENCE : 0;
    }
    work();
  }
}

static void announce(int tasks) {
  unsigned launch = atomic_load(&pool.launches) + 1;
  atomic_store(&pool.ticket, (uint64_t)launch << 32 | (uint64_t)tasks << 16);
  atomic_store(&pool.launches, launch);
  if (atomic_load(&pool.sleepers) > 0) futex_wake(&pool.launches, INT_MAX);
}

/* Both functions below are called with `launching` held. */

static void stop_workers(void) {
  if (pool.workers == 0) return;
  atomic_store(&pool.stopping, 1);
  announce(0);
  for (int i = 0; i < pool.workers; ++i) pthread_join(pool.threads[i], NULL);
  pool.workers = 0;
  atomic_store(&pool.stopping, 0);
  atomic_store(&pool.launches, 0); /* new workers start as if they had seen launch 0 */
}

static void start_workers(void) {
  sigset_t all, before;
  sigfillset(&all); /* signals go to the program's own threads */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (pool.workers < pool.wanted - 1) {
    pthread_t *thread = &pool.threads[pool.workers];
    atomic_store(&pool.processors[pool.workers + 1], -1);
    if (pthread_create(thread, NULL, worker, (void *)(intptr_t)(pool.workers + 1)) != 0) {
      pool.wanted = pool.workers + 1; /* use the threads that could be created */
      break;
    }
    pthread_setname_np(*thread, "edge-kernel");
    ++pool.workers;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static int threads_by_default(void) {
  const char *text = getenv("EDGE_NUM_THREADS");
  if (text != NULL && *text != '\0') {
    char *end = NULL;
    long n = strtol(text, &end, 10);
    if (*end == '\0' && n >= 1 && n <= MAX_THREADS) return (int)n;
  }
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return 1;
  int n = CPU_COUNT(&mask);
  return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
}

static int run_alone(ParallelLambda lambda, void *cdata) {
  ParallelGroupEnv env = {NULL, 1};
  return lambda(0, &env, cdata);
}

static int parallel_launch(ParallelLambda lambda, void *cdata, int num_task) {
  if (num_task == 1 || pthread_mutex_trylock(&pool.launching) != 0) return run_alone(lambda, cdata);
  if (pool.wanted == 0) pool.wanted = threads_by_default();
  if (pool.workers != pool.wanted - 1) start_workers();
  if (pool.workers == 0) {
    pthread_mutex_unlock(&pool.launching);
    return run_alone(lambda, cdata);
  }
  pool.lambda = lambda;
  pool.cdata = cdata;
  pool.env.sync_handle = NULL;
  pool.env.num_task = pool.workers + 1;
  atomic_store_explicit(&pool.failed_tasks, 0, memory_order_relaxed);
  atomic_store_explicit(&pool.pending, pool.env.num_task, memory_order_relaxed);
  atomic_store_explicit(&pool.caller, thread_id(), memory_order_relaxed);
  note_processor(0);
  announce(pool.env.num_task);
  int status = work();
  Spin spin = {0};
  int crowded = is_crowded(note_processor(0), 1, pool.wanted);
  while (!crowded && atomic_load(&pool.pending) != 0 && spins_on(&spin)) continue;
  int left;
  while ((left = atomic_load(&pool.pending)) != 0) {
    atomic_store(&pool.caller_sleeps, 1);
    futex_wait(&pool.pending, (unsigned)left);
    atomic_store(&pool.caller_sleeps, 0);
  }
  if (status == 0 && atomic_load(&pool.failed_tasks) != 0) {
    /* The worker's error is in its own thread-local storage, which the caller cannot read. */
    edge_raise("RuntimeError", "a kernel failed on a worker thread");
    status = -1;
  }
  pthread_mutex_unlock(&pool.launching);
  return status;
}

/* A thread may run several tasks of a launch one after another, so tasks cannot wait for each other. TVM's code for a
 * parallel loop has a barrier only if a schedule asks for one by name, and our schedules do not. */
static int parallel_barrier(int task_id, ParallelGroupEnv *env) {
  (void)task_id;
  if (env->num_task == 1) return 0;
  edge_raise("RuntimeError", "a kernel asks for a barrier, which this launcher does not have");
  return -1;
}

/* ---- tiles ---- */

/* With AMX, 0 if the kernel lets this process use tiles, else the number of its error. Linux asks a process to say
 * that it wants to: its threads then have 8 KiB more to save (Documentation/arch/x86/xstate.rst). Threads that are
 * made later inherit the permission, so it is asked for when the library is loaded. */
static int tiles_refused;

static void ask_for_tiles(void) {
#ifdef EDGE_TILES
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  tiles_refused = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 ? 0 : errno;
#endif
}

/* Whether kernels cannot run, because tiles were refused; sets the error. */
static int cannot_run(void) {
  if (tiles_refused == 0) return 0;
  char message[128];
  snprintf(message, sizeof message, "kernels need AMX: expected the system's permission to use tiles, got error %d",
           tiles_refused);
  edge_raise("RuntimeError", message);
  return 1;
}

/* ---- control, as packed functions (tvm/ffi/c_api.h, TVMFFISafeCallType) ---- */

int __tvm_ffi_edge_set_threads(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)self;
  if (num_args != 1 || args[0].type_index != kTVMFFIInt || args[0].v_int64 < 1 ||
      args[0].v_int64 > MAX_THREADS) {
    edge_raise("ValueError", "edge_set_threads: expected one integer, 1 to 256");
    return -1;
  }
  if (cannot_run()) return -1;
  pthread_mutex_lock(&pool.launching);
  if (pool.wanted != (int)args[0].v_int64) stop_workers();
  pool.wanted = (int)args[0].v_int64;
  pthread_mutex_unlock(&pool.launching);
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  return 0;
}

int __tvm_ffi_edge_threads(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)self, (void)args, (void)num_args;
  if (cannot_run()) return -1;
  pthread_mutex_lock(&pool.launching);
  if (pool.wanted == 0) pool.wanted = threads_by_default();
  result->type_index = kTVMFFIInt;
  result->v_int64 = pool.wanted;
  pthread_mutex_unlock(&pool.launching);
  return 0;
}

int __tvm_ffi_edge_flush_denormals(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  (void)self;
  if (num_args != 1 || args[0].type_index != kTVMFFIInt || (args[0].v_int64 != 0 && args[0].v_int64 != 1)) {
    edge_raise("ValueError", "edge_flush_denormals: expected one integer, 0 or 1");
    return -1;
  }
  result->type_index = kTVMFFIInt;
  result->v_int64 = flush_denormals((int)args[0].v_int64);
  return 0;
}

/* ---- load and unload ---- */

/* Weak symbols, defined by the kernels' object if it uses them; null otherwise. */
extern void *__TVMBackendParallelLaunch __attribute__((weak, visibility("hidden")));
extern void *__TVMBackendParallelBarrier __attribute__((weak, visibility("hidden")));
extern void *__TVMBackendAllocWorkspace __attribute__((weak, visibility("hidden")));
extern void *__TVMBackendFreeWorkspace __attribute__((weak, visibility("hidden")));

/* pthread_atfork calls this. In zig's x86-64 stubs, pthread_atfork is a symbol that glibc 2.34 no longer exports. */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *dso);
extern void *__dso_handle __attribute__((visibility("hidden")));
/* Unregisters the fork handler. Other compilers' start files call it when a library is unloaded; zig's do not. */
extern void __cxa_finalize(void *dso);

static void forget_workers(void) { /* a forked child has only the calling thread */
  pool.workers = 0;
  if (id_key_made) pthread_setspecific(id_key, NULL);
  pthread_mutex_init(&pool.launching, NULL);
  edge_forked_workspaces();
  atomic_store(&pool.launches, 0);
  atomic_store(&pool.sleepers, 0);
}

__attribute__((constructor)) static void on_load(void) {
  edge_open_workspaces();
  ask_for_tiles();
  id_key_made = pthread_key_create(&id_key, NULL) == 0;
  __register_atfork(NULL, NULL, forget_workers, &__dso_handle);
  if (&__TVMBackendParallelLaunch) __TVMBackendParallelLaunch = (void *)parallel_launch;
  if (&__TVMBackendParallelBarrier) __TVMBackendParallelBarrier = (void *)parallel_barrier;
  if (&__TVMBackendAllocWorkspace) __TVMBackendAllocWorkspace = (void *)edge_alloc_workspace;
  if (&__TVMBackendFreeWorkspace) __TVMBackendFreeWorkspace = (void *)edge_free_workspace;
}

__attribute__((destructor)) static void on_unload(void) {
  /* At exit another thread may be in the middle of a launch; it ends with the process. */
  if (pthread_mutex_trylock(&pool.launching) == 0) {
    stop_workers();
    pthread_mutex_unlock(&pool.launching);
  }
  if (id_key_made) pthread_key_delete(id_key);
  id_key_made = 0;
  edge_close_workspaces();
  __cxa_finalize(&__dso_handle);
}
