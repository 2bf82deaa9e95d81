/* Measures this machine's limits: independent multiply-adds, and a triad over arrays of any size.
 *   machine_peak fma THREADS            -> GFLOP/s
 *   machine_peak triad THREADS BYTES    -> GB/s; each thread's three arrays take BYTES together
 * The fastest of several attempts counts: none can exceed the limit, and a busy machine makes many slower.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
#define LANES (WIDTH / 4)
#define CHAINS 12 /* latency times units of all known cores; 16 registers hold them and two factors */
#define ATTEMPTS 20
#define SPAN_S 0.02

typedef float vec __attribute__((vector_size(WIDTH)));

static int threads;
static long elements;
static pthread_barrier_t barrier;
static long rounds;
static double spent[64];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static vec multiply_adds(long count, vec a, vec b) {
  vec s[CHAINS];
  for (int i = 0; i < CHAINS; i++) s[i] = a * (float)i;
  for (long n = 0; n < count; n++) {
#pragma clang loop unroll(full)
    for (int i = 0; i < CHAINS; i++) s[i] = s[i] * a + b;
    __asm__ volatile("" : "+x"(a), "+x"(b));
  }
  vec total = s[0];
  for (int i = 1; i < CHAINS; i++) total += s[i];
  return total;
}

static void triad(float *restrict a, const float *restrict b, const float *restrict c, float factor) {
  for (long i = 0; i < elements; i++) a[i] = b[i] + factor * c[i];
}

static void *work(void *argument) {
  long self = (long)argument;
  float *arrays[3] = {0};
  for (int i = 0; elements && i < 3; i++) {
    arrays[i] = aligned_alloc(4096, (size_t)elements * 4 + 4096);
    for (long j = 0; j < elements; j++) arrays[i][j] = 1.0f;
  }
  vec a = {0}, b = {0};
  a += 0.999f, b += 0.001f;
  pthread_barrier_wait(&barrier);
  double start = now();
  if (elements) {
    for (long r = 0; r < rounds; r++) {
      triad(arrays[0], arrays[1], arrays[2], 0.5f);
      __asm__ volatile("" ::: "memory");
    }
  } else {
    vec s = multiply_adds(rounds, a, b);
    __asm__ volatile("" ::"x"(s));
  }
  spent[self] = now() - start;
  for (int i = 0; i < 3; i++) free(arrays[i]);
  return NULL;
}

static double attempt(void) {
  pthread_t ids[64];
  pthread_barrier_init(&barrier, NULL, threads);
  for (long i = 0; i < threads; i++) pthread_create(&ids[i], NULL, work, (void *)i);
  double longest = 0;
  for (int i = 0; i < threads; i++) {
    pthread_join(ids[i], NULL);
    if (spent[i] > longest) longest = spent[i];
  }
  pthread_barrier_destroy(&barrier);
  return longest;
}

int main(int argc, char **argv) {
  if (argc < 3 || (threads = atoi(argv[2])) < 1 || threads > 64) return 2;
  int fma = !strcmp(argv[1], "fma");
  elements = fma ? 0 : atol(argv[3]) / 12 / LANES * LANES;
  double once = fma ? 2.0 * CHAINS * LANES : 12.0 * elements;
  rounds = 1;
  while (attempt() < SPAN_S) rounds *= 2;
  double best = 0;
  for (int i = 0; i < ATTEMPTS; i++) {
    double speed = once * rounds * threads / attempt() / 1e9;
    if (speed > best) best = speed;
  }
  printf("%.1f\n", best);
  return 0;
}
