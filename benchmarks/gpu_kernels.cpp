/* Every kernel of the device table beside a copy by the driver, on a GPU.
 *
 *     gpu_kernels [ELEMENTS [ROUNDS]]
 *
 * Each works on one tensor of so many elements, 256 Mi by default; bandwidth counts the
 * bytes that the formula has to read and write. The kernel and the copy take turns;
 * what is printed, a line of JSON each, are medians. Goals are shares of the copy's. */
#include "../tests/core/ct_rule_examples.h"
#include "../cuda/kernels.h"
#include "math/compact.h"

#include <algorithm>
#include <cuda_runtime_api.h>
#include <functional>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string>
#include <time.h>
#include <vector>

enum {
    ARRAYS = 4 + CT_RULE_MAX_STATES,
    GRAD = 0,
    PARAM,
    COPY,
    EMA,
    STATE,
    WARM_UP = 2,
    SKIPPED = 77
};

static size_t n = (size_t)1 << 28;
static size_t rounds = 10;
static void *arrays[ARRAYS]; /* of n floats each */

static void
check(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(cudaGetLastError()));
        exit(1);
    }
}

static double
seconds_of(const std::function<void()> &work)
{
    struct timespec start, end;
    check(cudaStreamSynchronize(NULL) == cudaSuccess, "synchronize");
    clock_gettime(CLOCK_MONOTONIC, &start);
    work();
    check(cudaStreamSynchronize(NULL) == cudaSuccess, "synchronize");
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - start.tv_sec) +
           1e-9 * (double)(end.tv_nsec - start.tv_nsec);
}

static double
median(std::vector<double> values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

/* From one array to another, by the driver; the emulation has no such copy. */
static void
copy()
{
#ifdef CT_EMUL
    const ct_span to = {arrays[EMA], n, CT_F32}, from = {arrays[STATE], n, CT_F32};
    check(ct_device_cuda.copy(NULL, &to, &from, 1, NULL) == CT_OK, "copy");
#else
    check(cudaMemcpyAsync(arrays[EMA], arrays[STATE], n * sizeof(float),
                          cudaMemcpyDeviceToDevice, NULL) == cudaSuccess,
          "copy");
#endif
}

/* The kernel moves so many bytes an element. */
static void
report(const std::string &name, double bytes, double goal,
       const std::function<ct_status(ct_error *)> &kernel)
{
    std::vector<double> ours, theirs;
    for (size_t i = 0; i < rounds + WARM_UP; i++) {
        const double mine = seconds_of([&] {
            ct_error err;
            check(kernel(&err) == CT_OK, name.c_str());
        });
        const double its = seconds_of(copy);
        if (i >= WARM_UP) {
            ours.push_back(bytes * (double)n / mine * 1e-9);
            theirs.push_back(2.0 * sizeof(float) * (double)n / its * 1e-9);
        }
    }
    printf("{\"benchmark\": \"gpu_kernels\", \"name\": \"%s, %zu elements\", "
           "\"unit\": \"GB/s\", \"ours\": %.6g, \"peer\": \"a copy\", "
           "\"theirs\": %.6g, \"ratio\": %.4g, \"goal\": %g}\n",
           name.c_str(), n, median(ours), median(theirs), median(ours) / median(theirs),
           goal);
    fflush(stdout);
}

static ct_span
span(int array, ct_dtype dtype)
{
    return {arrays[array], n, dtype};
}

static void
report_plain_kernels()
{
    const struct {
        const char *name;
        ct_dtype to, from;
    } copies[] = {
        {"copy, fp32",         CT_F32,  CT_F32 },
        {"copy, fp32 to bf16", CT_BF16, CT_F32 },
        {"copy, bf16 to fp32", CT_F32,  CT_BF16}
    };
    for (const auto &it : copies) {
        const ct_span to = span(COPY, it.to), from = span(PARAM, it.from);
        report(it.name, (double)(ct_dtype_size(it.to) + ct_dtype_size(it.from)), 0.92,
               [&](ct_error *err) {
                   return ct_device_cuda.copy(NULL, &to, &from, 1, err);
               });
    }
    const ct_span grad = span(GRAD, CT_F32), ema = span(EMA, CT_F32),
                  param = span(PARAM, CT_F32), half = span(COPY, CT_BF16);
    report("scale, fp32", 8, 0.92, [&](ct_error *err) {
        return ct_device_cuda.scale(NULL, 0.999, INFINITY, &grad, 1, err);
    });
    report("scale, bf16", 4, 0.92, [&](ct_error *err) {
        return ct_device_cuda.scale(NULL, 0.999, INFINITY, &half, 1, err);
    });
    report("zero, fp32", 4, 0.92,
           [&](ct_error *err) { return ct_device_cuda.zero(NULL, &ema, 1, err); });
    report("add, fp32", 12, 0.92, [&](ct_error *err) {
        return ct_device_cuda.add(NULL, &ema, &param, 1, 0.5, err);
    });
    report("average, fp32", 12, 0.92, [&](ct_error *err) {
        return ct_device_cuda.average(NULL, &ema, &param, 1, 0.99, err);
    });
}

static void
report_norms()
{
    ct_scratch scratch = {};
    double *sum = NULL;
    check(cudaMalloc((void **)&sum, sizeof *sum) == cudaSuccess, "cudaMalloc");
    for (double p : {2.0, (double)INFINITY}) {
        for (ct_dtype dtype : {CT_F32, CT_BF16}) {
            const ct_span grad = span(GRAD, dtype);
            const std::string name = isinf(p) ? "norm, inf, " : "norm, 2, ";
            report(name + (dtype == CT_F32 ? "fp32" : "bf16"),
                   (double)ct_dtype_size(dtype), 0.92, [&](ct_error *err) {
                       return ct_device_cuda.norm(NULL, &scratch, p, &grad, 1, sum,
                                                  err);
                   });
        }
    }
    ct_device_cuda.scratch_release(&scratch);
    (void)cudaFree(sum);
}

static void
report_span(const std::string &name, ct_rule rule, const ct_update_span &span,
            double bytes, double goal)
{
    const ct_rule_coef coef = ct_rule_example(rule, 0);
    const ct_update update = {rule, &coef, &span, 1, false, 0.0, NULL};
    ct_update_table table = {};
    report(name, bytes, goal, [&](ct_error *err) {
        return ct_device_cuda.update(NULL, &table, &update, err);
    });
    ct_device_cuda.table_release(&table);
}

static void
report_update(const std::string &name, ct_rule rule, bool master, double goal)
{
    const size_t n_states = ct_rule_n_states(rule);
    ct_update_span it = {};
    it.n = n;
    it.grad = arrays[GRAD];
    it.param = arrays[PARAM];
    it.copy = master ? arrays[COPY] : NULL;
    for (size_t k = 0; k < n_states; k++) {
        it.state[k] = arrays[STATE + k];
    }
    it.dtype = it.state_dtype = it.ema_dtype = CT_F32;
    it.grad_dtype = it.copy_dtype = master ? CT_BF16 : CT_F32;
    report_span(name, rule, it, 8 + (master ? 2 + 2 : 4) + 8.0 * (double)n_states,
                goal);
}

/* Parameters and gradients in bf16, of 8 bits the states and what the parameters lack.
 */
static void
report_compact_update(const std::string &name, ct_rule rule)
{
    const size_t n_states = ct_rule_n_states(rule);
    ct_update_span it = {};
    it.n = n;
    it.grad = arrays[GRAD];
    it.param = arrays[PARAM];
    it.correction = (int8_t *)arrays[EMA];
    for (size_t k = 0; k < n_states; k++) {
        it.state[k] = arrays[STATE + k];
        it.quant[k].scales = (uint16_t *)((char *)arrays[STATE + k] + n);
    }
    it.dtype = it.grad_dtype = it.copy_dtype = it.ema_dtype = CT_BF16;
    it.state_dtype = CT_I8;
    const double scales = 2.0 * sizeof(uint16_t) / CT_COMPACT_GROUP;
    report_span(name, rule, it, 2 + 2 * (2 + 1) + (double)n_states * (2 + scales),
                0.88);
}

static void
report_updates()
{
    static const char *const names[] = {
#define CT_RULE(rule, constants, states) #rule,
#include "math/rules.def"
#undef CT_RULE
    };
    for (int rule = 0; rule < CT_RULE_COUNT; rule++) {
        report_update(std::string("update, ") + names[rule] + ", fp32", (ct_rule)rule,
                      false, 0.90);
    }
    report_update("update, adamw, bf16 with a float32 copy", CT_RULE_adamw, true, 0.88);
    report_compact_update("update, adamw, compact state, bf16", CT_RULE_adamw);
    report_compact_update("update, lion, compact state, bf16", CT_RULE_lion);
}

int
main(int argc, char **argv)
{
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "no CUDA device\n");
        return SKIPPED;
    }
    n = argc > 1 ? strtoull(argv[1], NULL, 10) : n;
    rounds = argc > 2 ? strtoull(argv[2], NULL, 10) : rounds;
    for (void *&array : arrays) {
        check(cudaMalloc(&array, n * sizeof(float)) == cudaSuccess, "cudaMalloc");
        const ct_span zeroed = {array, n, CT_F32};
        check(ct_device_cuda.zero(NULL, &zeroed, 1, NULL) == CT_OK, "zero");
    }
    report_plain_kernels();
    report_norms();
    report_updates();
    return 0;
}
