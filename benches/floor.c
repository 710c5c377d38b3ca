// The floor of an all_reduce on one host: all buffers are in shared memory; rank r sums slice r of all of them
// and writes the sum to all of them, between two barriers. Nothing is copied, queued or checked.
//
//   cc -O3 -march=native floor.c -o floor && ./floor RANKS BYTES...     prints bytes and microseconds
//
// Microseconds are those of the slowest rank, the median of the iterations, as in `trigram bench`.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 16, ITERATIONS = 30, WARM = 5 };

typedef struct {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int round;
    double seconds[MOST][ITERATIONS];
} Shared;

static int world, spins;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *map_shared(size_t bytes) {
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(1);
    return at;
}

static void barrier(Shared *s) {
    int round = atomic_load(&s->round);
    if (atomic_fetch_add(&s->arrived, 1) == world - 1) {
        atomic_store(&s->arrived, 0);
        atomic_store(&s->round, round + 1);
        syscall(SYS_futex, &s->round, FUTEX_WAKE, 1 << 30, 0, 0, 0);
        return;
    }
    for (int i = 0; i < spins; i++)
        if (atomic_load_explicit(&s->round, memory_order_acquire) != round) return;
    while (atomic_load(&s->round) == round) syscall(SYS_futex, &s->round, FUTEX_WAIT, round, 0, 0, 0);
}

static void sum(float **x, size_t from, size_t to) {
    float *a = x[0], *b = x[1], *c = x[2], *d = x[3];
    if (world == 2) {
#pragma GCC ivdep
        for (size_t i = from; i < to; i++) a[i] = b[i] = a[i] + b[i];
    } else if (world == 4) {
#pragma GCC ivdep
        for (size_t i = from; i < to; i++) a[i] = b[i] = c[i] = d[i] = a[i] + b[i] + c[i] + d[i];
    } else {
        for (size_t i = from; i < to; i++) {
            float s = 0;
            for (int k = 0; k < world; k++) s += x[k][i];
            for (int k = 0; k < world; k++) x[k][i] = s;
        }
    }
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int count, char **argument) {
    world = count > 2 ? atoi(argument[1]) : 0;
    if (world < 2 || world > MOST) return fprintf(stderr, "usage: floor RANKS BYTES...\n"), 2;
    spins = world <= sysconf(_SC_NPROCESSORS_ONLN) ? 20000 : 0;
    Shared *s = map_shared(sizeof *s);
    int rank = 0;
    for (int a = 2; a < count; a++) {
        size_t bytes = strtoull(argument[a], 0, 10), n = bytes / sizeof(float);
        float *x[MOST];
        for (int k = 0; k < world; k++) x[k] = map_shared(bytes + 64);
        for (rank = 0; rank < world - 1; rank++)
            if (fork() == 0) break;
        for (int k = -WARM; k < ITERATIONS; k++) {
            // Filled with ones once, for the check, and then with zeros, so that sums do not overflow.
            if (k < 2 - WARM)
                for (size_t i = 0; i < n; i++) x[rank][i] = k == -WARM;
            barrier(s);
            double start = now();
            barrier(s);
            sum(x, n * rank / world, n * (rank + 1) / world);
            barrier(s);
            if (k >= 0) s->seconds[rank][k] = now() - start;
            for (size_t i = 0; i < n && k == -WARM; i++)
                if (x[rank][i] != (float)world) return fprintf(stderr, "wrong sum\n"), 1;
            barrier(s);
        }
        if (rank < world - 1) return 0;
        while (wait(0) > 0) {}
        for (int k = 0; k < ITERATIONS; k++)
            for (int r = 1; r < world; r++)
                if (s->seconds[r][k] > s->seconds[0][k]) s->seconds[0][k] = s->seconds[r][k];
        qsort(s->seconds[0], ITERATIONS, sizeof(double), compare);
        printf("%zu %.2f\n", bytes, s->seconds[0][ITERATIONS / 2] * 1e6);
        fflush(stdout);
        for (int k = 0; k < world; k++) munmap(x[k], bytes + 64);
    }
    return 0;
}
