/* Calls kernels in an emulated machine, one after the other, with marks that let blocks.c tell them apart.
 *
 * Only a few iterations of each parallel loop run, evenly spread, and are counted for all: iterations are alike, and
 * the emulator takes sixty nanoseconds for each vector of multiply-adds. The generated table.h holds the kernels, the
 * shapes of their arguments, and the number of iterations of each of their parallel loops.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#ifndef SAMPLES
#define SAMPLES 8
#endif

enum { MARK = 24301, MOST_ARGUMENTS = 16, MOST_LAUNCHES = 16, MOST_DIMENSIONS = 12 };

typedef struct {
  void *sync_handle;
  int32_t num_task;
} Group;
typedef int (*Lambda)(int task, Group *group, void *data);
typedef int (*Function)(void *self, const TVMFFIAny *arguments, int32_t count, TVMFFIAny *result);
typedef struct {
  Function function;
  int launches[MOST_LAUNCHES]; /* ended by 0 */
} Kernel;
typedef struct {
  int code, bits, dimensions;
  int64_t shape[MOST_DIMENSIONS];
} Argument;

#include "table.h"

extern void *__TVMBackendParallelLaunch __attribute__((weak));
extern void *__TVMBackendAllocWorkspace __attribute__((weak));
extern void *__TVMBackendFreeWorkspace __attribute__((weak));

static int current, launch;

static int parallel_launch(Lambda lambda, void *data, int tasks) {
  (void)tasks;
  int all = launch < MOST_LAUNCHES ? kernels[current].launches[launch] : 0;
  if (all == 0) abort(); /* the table has fewer loops than the kernel */
  launch++;
  int run = all < SAMPLES ? all : SAMPLES;
  Group group = {NULL, all};
  syscall(MARK, 1, current, 1, 1);
  for (int i = 0; i < run; i++) {
    int result = lambda((int)((2 * i + 1) * (int64_t)all / (2 * run)), &group, data);
    if (result) return result;
  }
  syscall(MARK, 1, current, all, run);
  return 0;
}

static void *alloc_workspace(int type, int id, uint64_t size, int code, int bits) {
  (void)type, (void)id, (void)code, (void)bits;
  return aligned_alloc(64, (size + 63) / 64 * 64);
}

static int free_workspace(int type, int id, void *memory) {
  (void)type, (void)id;
  free(memory);
  return 0;
}

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  (void)kind;
  for (int32_t i = 0; i < count; i++) write(2, parts[i], strlen(parts[i]));
  write(2, "\n", 1);
}

int main(void) {
  if (&__TVMBackendParallelLaunch) __TVMBackendParallelLaunch = (void *)parallel_launch;
  if (&__TVMBackendAllocWorkspace) __TVMBackendAllocWorkspace = (void *)alloc_workspace;
  if (&__TVMBackendFreeWorkspace) __TVMBackendFreeWorkspace = (void *)free_workspace;
  DLTensor tensors[MOST_ARGUMENTS];
  TVMFFIAny packed[MOST_ARGUMENTS], result;
  int count = sizeof arguments / sizeof *arguments;
  for (int i = 0; i < count; i++) {
    const Argument *a = &arguments[i];
    int64_t bytes = a->bits / 8;
    for (int d = 0; d < a->dimensions; d++) bytes *= a->shape[d];
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) return 3;
    memset(memory, 0, bytes);
    if (a->code == kDLFloat && a->bits == 32) /* the emulator computes differently with zeros */
      for (int64_t e = 0; e < bytes / 4; e++) ((float *)memory)[e] = 0.37f + (float)(e % 7) * 0.11f;
    tensors[i] = (DLTensor){memory, {kDLCPU, 0}, a->dimensions, {a->code, a->bits, 1}, (int64_t *)a->shape, NULL, 0};
    memset(&packed[i], 0, sizeof packed[i]);
    packed[i].type_index = kTVMFFIDLTensorPtr;
    packed[i].v_ptr = &tensors[i];
  }
  for (current = 0; current < (int)(sizeof kernels / sizeof *kernels); current++) {
    launch = 0;
    memset(&result, 0, sizeof result);
    syscall(MARK, 0);
    if (kernels[current].function(NULL, packed, count, &result)) return 4;
    syscall(MARK, 1, current, 1, 1);
  }
  return 0;
}
