/* Workspace: the memory that a kernel needs only while it runs.
 *
 * Promises
 * - Each thread has its own stack of blocks, which kernels free in the reverse order, as TVM's code does. Another order
 *   is right too, but the memory is used again only when the thread has no block left.
 * - Between kernels, a thread keeps one region, as large as the most that it needed at once in any kernel so far, and
 *   the headers. Its builder adds that up (builder/codegen/workspaces.py), and the manifest declares it.
 * - The thread that allocates a block frees it. A thread's memory is freed when it ends, or the library is unloaded.
 *
 * Regions come from mmap, not from malloc: the heap that glibc makes for a thread takes 64 MiB of address space, which
 * is limited in a worker, and would keep what is freed.
 */
#define _GNU_SOURCE
#include "launcher.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Kernels assume blocks aligned to 64 bytes. Headers take as much, so that what follows them is aligned too. */
enum { ALIGNMENT = 64 };

typedef struct Region {
  struct Region *below;
  size_t bytes, used; /* both include this header */
} Region;

typedef struct Stack {
  struct Stack *next, *previous;
  Region *top;
  size_t live, most; /* bytes in blocks and their headers: now, and at most so far */
} Stack;

typedef struct {
  Stack *stack;
  Region *region;
  size_t start, bytes; /* of this header, in the region; `bytes` includes it */
} Block;

_Static_assert(sizeof(Region) <= ALIGNMENT && sizeof(Block) <= ALIGNMENT, "a header takes 64 bytes");

static pthread_mutex_t stacks_lock = PTHREAD_MUTEX_INITIALIZER;
static Stack *stacks;
static pthread_key_t stack_key;
static int stack_key_made;

static void unmap_top(Stack *stack) {
  Region *gone = stack->top;
  stack->top = gone->below;
  munmap(gone, gone->bytes);
}

static void free_stack(void *argument) {
  Stack *stack = argument;
  pthread_mutex_lock(&stacks_lock);
  if (stack->previous) stack->previous->next = stack->next;
  else stacks = stack->next;
  if (stack->next) stack->next->previous = stack->previous;
  pthread_mutex_unlock(&stacks_lock);
  while (stack->top != NULL) unmap_top(stack);
  free(stack);
}

static Stack *my_stack(void) {
  if (!stack_key_made) return NULL;
  Stack *stack = pthread_getspecific(stack_key);
  if (stack != NULL) return stack;
  stack = calloc(1, sizeof *stack);
  if (stack == NULL || pthread_setspecific(stack_key, stack) != 0) {
    free(stack);
    return NULL;
  }
  pthread_mutex_lock(&stacks_lock);
  stack->next = stacks;
  if (stacks) stacks->previous = stack;
  stacks = stack;
  pthread_mutex_unlock(&stacks_lock);
  return stack;
}

/* Puts a region with room for `bytes` on top of the stack. Returns whether there was memory. */
static int add_region(Stack *stack, size_t bytes) {
  /* A region without blocks is too small. If no block is left at all, one region for everything replaces them. */
  while (stack->top != NULL && (stack->live == 0 || stack->top->used == ALIGNMENT)) unmap_top(stack);
  if (stack->live == 0 && bytes < stack->most) bytes = stack->most;
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  if (stack->top != NULL) { /* what earlier kernels wrote above the blocks would stay in memory beside the new region */
    size_t used = (stack->top->used + page - 1) / page * page;
    madvise((char *)stack->top + used, stack->top->bytes - used, MADV_DONTNEED);
  }
  bytes = (bytes + ALIGNMENT + page - 1) / page * page;
  Region *region = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (region == MAP_FAILED) return 0;
  region->below = stack->top;
  region->bytes = bytes;
  region->used = ALIGNMENT;
  stack->top = region;
  return 1;
}

void *edge_alloc_workspace(int device_type, int device_id, uint64_t nbytes, int code, int bits) {
  (void)device_type, (void)device_id, (void)code, (void)bits;
  Stack *stack = my_stack();
  size_t bytes = ((size_t)nbytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; /* with the header */
  if (stack == NULL || nbytes > SIZE_MAX / 2 ||
      ((stack->top == NULL || stack->top->bytes - stack->top->used < bytes) && !add_region(stack, bytes))) {
    edge_raise("MemoryError", "there is no memory for a kernel's workspace");
    return NULL;
  }
  Region *region = stack->top;
  Block *block = (Block *)((char *)region + region->used);
  *block = (Block){stack, region, region->used, bytes};
  region->used += bytes;
  stack->live += bytes;
  if (stack->live > stack->most) stack->most = stack->live;
  return (char *)block + ALIGNMENT;
}

int edge_free_workspace(int device_type, int device_id, void *memory) {
  (void)device_type, (void)device_id;
  if (memory == NULL) return 0;
  Block *block = (Block *)((char *)memory - ALIGNMENT);
  Stack *stack = block->stack;
  Region *region = block->region;
  if (block->start + block->bytes == region->used) region->used = block->start;
  stack->live -= block->bytes;
  if (stack->live == 0) {
    stack->top->used = ALIGNMENT;
    if (stack->top->below != NULL) /* the next block makes one region that is large enough for all */
      while (stack->top != NULL) unmap_top(stack);
  }
  return 0;
}

void edge_open_workspaces(void) { stack_key_made = pthread_key_create(&stack_key, free_stack) == 0; }

void edge_forked_workspaces(void) { pthread_mutex_init(&stacks_lock, NULL); }

void edge_close_workspaces(void) {
  if (stack_key_made) pthread_key_delete(stack_key);
  stack_key_made = 0;
  /* At exit another thread may be in the middle of a kernel; its memory goes with the process. */
  for (Stack *stack = stacks, *next; stack != NULL; stack = next) {
    next = stack->next;
    if (stack->live == 0) free_stack(stack);
  }
}
