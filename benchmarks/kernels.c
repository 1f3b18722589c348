/* Norm + AdamW against the memory of this machine.
 *
 * For each shape: the two passes of an update (36 bytes a parameter in fp32), and
 * beside them loops that touch the same memory in the same way and compute next to
 * nothing, the limit that no update can beat. The two alternate; what is printed are
 * medians, and their ratio. With --json, a line of JSON each. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "core/base/alloc.h"
#include "core/optim/optim.h"
#include "core/base/pool.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    ROUNDS = 25,
    BATCH = 65536
};

typedef struct tensors {
    size_t count, n; /* count tensors of n elements */
    float *memory[4];
    ct_optim *optim;
} tensors;

/* With one thread the time that this process had a processor: others may share it. */
static double
now(void)
{
    struct timespec t;
    clock_gettime(ct_pool_threads() == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC,
                  &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void
die(const char *what)
{
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static tensors
tensors_make(size_t count, size_t n)
{
    tensors t = {.count = count, .n = n};
    for (int k = 0; k < 4; k++) {
        t.memory[k] = ct_alloc(count * n * sizeof(float));
        if (t.memory[k] == NULL) {
            die("out of memory");
        }
        for (size_t i = 0; i < count * n; i++) {
            t.memory[k][i] = 1e-3f * (float)(i % 97);
        }
    }
    t.optim = ct_optim_new(&ct_device_cpu);
    if (t.optim == NULL || ct_optim_resize(t.optim, 1, count, NULL) != CT_OK) {
        die("out of memory");
    }
    ct_optim_groups_borrow(t.optim)[0].adamw = (ct_adamw_config){
        .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    for (size_t i = 0; i < count; i++) {
        ct_optim_params_borrow(t.optim)[i] = (ct_optim_param){
            .grad = t.memory[0] + i * n,
            .param = t.memory[1] + i * n,
            .state = {t.memory[2] + i * n, t.memory[3] + i * n},
            .n = n,
            .dtype = CT_F32,
        };
    }
    return t;
}

static void
tensors_free(tensors *t)
{
    ct_optim_free(t->optim);
    for (int k = 0; k < 4; k++) {
        ct_free(t->memory[k]);
    }
}

typedef struct touch_job {
    float *memory[4];
    size_t n;
    unsigned *sums; /* one for each batch, so that no read can be left out */
} touch_job;

static size_t
batch_end(const touch_job *job, size_t batch)
{
    const size_t end = (batch + 1) * BATCH;
    return end < job->n ? end : job->n;
}

static void
touch_read(void *arg, size_t batch)
{
    const touch_job *job = arg;
    const size_t end = batch_end(job, batch);
    const unsigned *restrict x = (const void *)job->memory[0];
    unsigned sum = 0;
    for (size_t i = batch * BATCH; i < end; i++) {
        sum += x[i];
    }
    job->sums[batch] = sum;
}

static void
touch_write(void *arg, size_t batch)
{
    const touch_job *job = arg;
    const size_t end = batch_end(job, batch);
    float *restrict g = job->memory[0];
    float *restrict p = job->memory[1];
    float *restrict m = job->memory[2];
    float *restrict v = job->memory[3];
    for (size_t i = batch * BATCH; i < end; i++) {
        const float x = g[i];
        g[i] = 0.0f;
        p[i] += x;
        m[i] += x;
        v[i] += x;
    }
}

static void
run_limit(const touch_job *job)
{
    const size_t batches = (job->n - 1) / BATCH + 1;
    ct_pool_run(touch_read, (void *)job, batches);
    ct_pool_run(touch_write, (void *)job, batches);
}

static void
run_update(const tensors *t)
{
    ct_grads *grads;
    if (ct_optim_grads(t->optim, &grads, NULL) != CT_OK ||
        ct_grads_sum(grads, NULL, 2.0, false, NULL) != CT_OK) {
        die("the norm failed");
    }
    const double scale = 1.0 / (1.0 + sqrt(*ct_grads_total(grads)));
    if (ct_optim_update(t->optim, NULL,
                        &(ct_optim_pass){.grad_scale = scale, .zero_grads = true},
                        NULL) != CT_OK) {
        die("the update failed");
    }
}

static int
ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void
report(const char *name, bool json, size_t elems, double *ours, double *limit)
{
    qsort(ours, ROUNDS, sizeof ours[0], ascending);
    qsort(limit, ROUNDS, sizeof limit[0], ascending);
    const double our_ms = ours[ROUNDS / 2] * 1e3, limit_ms = limit[ROUNDS / 2] * 1e3;
    if (json) {
        printf(
            "{\"benchmark\": \"update\", \"name\": \"norm + AdamW + zero in C, %s\", "
            "\"unit\": \"ms\", \"peer\": \"this memory\", \"ours\": %.4f, "
            "\"theirs\": %.4f, \"ratio\": %.4f, \"goal\": 0.85}\n",
            name, our_ms, limit_ms, limit_ms / our_ms);
        return;
    }
    printf("%-22s %-4s %zu threads: update %7.3f ms, best %7.3f; memory %7.3f ms, best "
           "%7.3f; %5.1f GB/s, %5.1f %% of the limit\n",
           name, ct_cpu_isa(), ct_pool_threads(), our_ms, ours[0] * 1e3, limit_ms,
           limit[0] * 1e3, 36e-6 * (double)elems / our_ms, 100.0 * limit_ms / our_ms);
}

static void
bench(const char *name, bool json, size_t count, size_t n, int inner)
{
    tensors t = tensors_make(count, n);
    touch_job job = {.n = count * n};
    job.sums = ct_alloc((job.n / BATCH + 1) * sizeof *job.sums);
    if (job.sums == NULL) {
        die("out of memory");
    }
    for (int k = 0; k < 4; k++) {
        job.memory[k] = t.memory[k];
    }
    double ours[ROUNDS], limit[ROUNDS];
    for (int r = -1; r < ROUNDS; r++) { /* round -1 warms up */
        const double start = now();
        for (int i = 0; i < inner; i++) {
            run_update(&t);
        }
        const double middle = now();
        for (int i = 0; i < inner; i++) {
            run_limit(&job);
        }
        if (r >= 0) {
            ours[r] = (middle - start) / inner;
            limit[r] = (now() - middle) / inner;
        }
    }
    report(name, json, count * n, ours, limit);
    ct_free(job.sums);
    tensors_free(&t);
}

int
main(int argc, char **argv)
{
    const bool json = argc == 2 && strcmp(argv[1], "--json") == 0;
    if (argc != 1 && !json) {
        die("usage: bench_kernels [--json]");
    }
    bench("one tensor of 25M", json, 1, 25000000, 1);
    bench("100 tensors of 227k", json, 100, 227000, 1);
    bench("1000 tensors of 1000", json, 1000, 1000, 20);
    return 0;
}
