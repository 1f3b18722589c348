#include "core/base/alloc.h"
#include "ct_kernels.h"
#include "ct_random.h"

#include <math.h>
#include <string.h>

enum {
    MOST_SPANS = 30
};

static const double powers[] = {2.0, 1.0, INFINITY, 3.0, 8.0, 15.0, 0.5, 7.25};
enum {
    N_POWERS = sizeof powers / sizeof *powers
};

static double
sum_of(double p, const ct_span *spans, size_t n_spans)
{
    ct_scratch scratch = {0};
    double sum = -1.0;
    CHECK(ct_device_cpu.norm(NULL, &scratch, p, spans, n_spans, &sum, NULL) == CT_OK);
    ct_device_cpu.scratch_release(&scratch);
    return sum;
}

static void
sums_of(double p, const ct_span *spans, size_t n_spans, double *sums)
{
    ct_scratch scratch = {0};
    CHECK(ct_device_cpu.norms(NULL, &scratch, p, spans, n_spans, sums, NULL) == CT_OK);
    ct_device_cpu.scratch_release(&scratch);
}

typedef struct problem {
    ct_span spans[MOST_SPANS];
    void *blocks[MOST_SPANS];
    size_t n_spans;
    double p, sum, each[MOST_SPANS];
} problem;

static problem
problem_make(ct_random *r)
{
    static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_F16};
    problem p = {.n_spans = 1 + ct_random_below(r, MOST_SPANS)};
    for (size_t i = 0; i < p.n_spans; i++) {
        const size_t n = ct_random_below(r, i % 10 == 9 ? 150000 : 400);
        const ct_dtype dtype = dtypes[ct_random_below(r, 4)];
        p.blocks[i] = ct_alloc((n + 1) * ct_dtype_size(dtype));
        p.spans[i] = (ct_span){(char *)p.blocks[i] + ct_dtype_size(dtype), n, dtype};
        for (size_t e = 0; e < n; e++) {
            ct_store(dtype, p.spans[i].data, e, 3.0 * ct_random_unit(r));
        }
    }
    return p;
}

static void
problem_free(problem *p)
{
    for (size_t i = 0; i < p->n_spans; i++) {
        ct_free(p->blocks[i]);
    }
}

static void
check_same_bits(void *arg)
{
    const problem *all = arg;
    double each[MOST_SPANS];
    CHECK(sum_of(all->p, all->spans, all->n_spans) == all->sum);
    sums_of(all->p, all->spans, all->n_spans, each);
    CHECK(memcmp(each, all->each, all->n_spans * sizeof *each) == 0);
}

/* A sum by long double's arithmetic, with one span more. */
static long double
reference(double p, long double sum, const ct_span *span)
{
    for (size_t e = 0; e < span->n; e++) {
        const long double x = fabs(ct_load(span->dtype, span->data, e));
        sum = isinf(p) ? fmaxl(sum, x) : sum + powl(x, p);
    }
    return sum;
}

/* Powers are >= 0: adding n of them in any order is off by at most (n - 1) * 2^-53 of
 * their sum. x is exact in double, x * x off by 2^-53, pow() by one unit in the last
 * place, 2^-52, a whole power of p by (p - 1) * 2^-53. The largest is exact. */
static void
check_close(double p, double got, long double exact, size_t n)
{
    const double power = fmax(3.0, p), bound = ((double)n + power) * 0x1p-53;
    CHECK(isinf(p) ? got == exact : fabsl(got - exact) <= exact * bound);
}

static void
test_random_lists_are_summed_to_double_precision_and_always_alike(void)
{
    ct_random r = {99};
    for (size_t round = 0; round < 40; round++) {
        problem all = problem_make(&r);
        long double exact = 0.0L;
        size_t total = 0;
        all.p = powers[round % N_POWERS];
        sums_of(all.p, all.spans, all.n_spans, all.each);
        for (size_t i = 0; i < all.n_spans; i++) {
            const long double one = reference(all.p, 0.0L, &all.spans[i]);
            check_close(all.p, all.each[i], one, all.spans[i].n);
            total += all.spans[i].n;
            exact = reference(all.p, exact, &all.spans[i]);
        }
        all.sum = sum_of(all.p, all.spans, all.n_spans);
        check_close(all.p, all.sum, exact, total);
        ct_for_each_setting(check_same_bits, &all);
        problem_free(&all);
    }
}

static void
test_the_sum_depends_on_the_values_and_not_on_where_they_lie(void)
{
    enum {
        N = 5000
    };
    ct_random r = {5};
    float memory[N + 16];
    double first = 0.0;
    for (size_t shift = 0; shift < 16; shift++) {
        r.state = 5;
        for (size_t i = 0; i < N; i++) {
            memory[shift + i] = (float)ct_random_unit(&r);
        }
        const ct_span span = {memory + shift, N, CT_F32};
        first = shift == 0 ? sum_of(2.0, &span, 1) : first;
        CHECK(sum_of(2.0, &span, 1) == first);
    }
}

static void
test_a_bad_span_leaves_its_neighbours_sums_alone(void)
{
    float values[3][200];
    ct_span spans[3];
    for (size_t i = 0; i < 3; i++) {
        for (size_t e = 0; e < 200; e++) {
            values[i][e] = 1.0f;
        }
        spans[i] = (ct_span){values[i], 200, CT_F32};
    }
    values[1][150] = NAN;
    double sums[3];
    sums_of(2.0, spans, 3, sums);
    CHECK(sums[0] == 200.0 && isnan(sums[1]) && sums[2] == 200.0);
    sums_of(INFINITY, spans, 3, sums);
    CHECK(sums[0] == 1.0 && isnan(sums[1]) && sums[2] == 1.0);
}

static void
check_found(void *unused)
{
    enum {
        N = 40 * N_POWERS
    };
    static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_F16};
    static const double values[] = {NAN, INFINITY, -INFINITY};
    double memory[N];
    (void)unused;
    for (size_t d = 0; d < 4; d++) {
        const ct_span span = {memory, N, dtypes[d]};
        for (size_t i = 0; i < N; i++) {
            ct_store(dtypes[d], memory, i, 1.0);
        }
        for (size_t at = 0; at < N; at++) {
            for (size_t v = 0; v < 3; v++) {
                ct_store(dtypes[d], memory, at, values[v]);
                const double sum = sum_of(powers[at % N_POWERS], &span, 1);
                CHECK(isnan(values[v]) ? isnan(sum) : isinf(sum));
            }
            ct_store(dtypes[d], memory, at, 1.0);
        }
    }
}

static void
test_nan_and_infinity_are_found_in_every_position_and_dtype(void)
{
    ct_for_each_setting(check_found, NULL);
}

static void
test_the_largest_floats_do_not_overflow(void)
{
    float values[100];
    for (size_t i = 0; i < 100; i++) {
        values[i] = 0x1.fffffep127f;
    }
    const ct_span span = {values, 100, CT_F32};
    CHECK(isfinite(sum_of(2.0, &span, 1)) && sum_of(2.0, &span, 1) > 1e78);
}

static void
test_nothing_sums_to_zero(void)
{
    const ct_span empty[2] = {
        {NULL, 0, CT_F32},
        {NULL, 0, CT_F16}
    };
    double sums[2] = {1.0, 1.0};
    for (size_t k = 0; k < N_POWERS; k++) {
        CHECK(sum_of(powers[k], NULL, 0) == 0.0);
        CHECK(sum_of(powers[k], empty, 2) == 0.0);
        sums_of(powers[k], NULL, 0, NULL);
        sums_of(powers[k], empty, 2, sums);
        CHECK(sums[0] == 0.0 && sums[1] == 0.0);
        sums[0] = sums[1] = 1.0;
    }
}

static void
test_a_dtype_that_is_no_float_is_rejected(void)
{
    int32_t x = 3;
    ct_error err;
    double sum = -1.0;
    const ct_span span = {&x, 1, CT_I32};
    CHECK(ct_device_cpu.norm(NULL, NULL, 2.0, &span, 1, &sum, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "norm: span 0 is int32") != NULL && sum == -1.0);
    CHECK(ct_device_cpu.norms(NULL, NULL, 2.0, &span, 1, &sum, &err) == CT_EINVAL);
    CHECK(sum == -1.0);
}

int
main(void)
{
    test_random_lists_are_summed_to_double_precision_and_always_alike();
    test_the_sum_depends_on_the_values_and_not_on_where_they_lie();
    test_nan_and_infinity_are_found_in_every_position_and_dtype();
    test_a_bad_span_leaves_its_neighbours_sums_alone();
    test_the_largest_floats_do_not_overflow();
    test_nothing_sums_to_zero();
    test_a_dtype_that_is_no_float_is_rejected();
    return 0;
}
