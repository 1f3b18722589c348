#include "core/engine/noise.h"
#include "core/base/alloc.h"
#include "ct_kernels.h"
#include "ct_random.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

static void
test_two_opposite_deviations_give_signal_and_trace(void)
{
    /* Means 5 and 1 of equal halves of 8 examples: the update's gradient is 3. */
    ct_noise noise = {0};
    ct_noise_sample sample = {0};
    ct_noise_see(&sample, 0.5, 2.5 * 2.5);
    ct_noise_see(&sample, 0.0, 0.0);
    ct_noise_see(&sample, 0.5, 0.5 * 0.5);
    CHECK(sample.n == 2 && sample.small == 13.0);
    CHECK(ct_noise_add(&noise, &sample, 9.0, 8.0));
    CHECK(fabs(noise.trace / noise.weight - 8.0 * 4.0) < 1e-13);
    CHECK(fabs(noise.signal / noise.weight - 5.0) < 1e-14);
    CHECK(fabs(ct_noise_scale(&noise) - 32.0 / 5.0) < 1e-14);
}

/* Examples with gradients of mean m and variance v: in one dimension T is v. Each
 * micro-batch's mean is drawn from a distribution of variance v / (share * batch). */
static void
test_the_estimates_are_unbiased_for_micro_batches_of_unequal_sizes(void)
{
    enum {
        UPDATES = 200000,
        BATCH = 16
    };
    static const double shares[] = {0.5, 0.25, 0.125, 0.125};
    const double mean = 1.5, variance = 6.0;
    ct_random r = {7};
    double trace = 0.0, signal = 0.0;
    for (int u = 0; u < UPDATES; u++) {
        ct_noise noise = {0};
        ct_noise_sample sample = {0};
        double whole = 0.0;
        for (size_t i = 0; i < 4; i++) {
            const double deviation = sqrt(3.0 * variance / (shares[i] * BATCH));
            const double part = shares[i] * (mean + deviation * ct_random_unit(&r));
            ct_noise_see(&sample, shares[i], part * part);
            whole += part;
        }
        CHECK(ct_noise_add(&noise, &sample, whole * whole, BATCH));
        trace += noise.trace / noise.weight / UPDATES;
        signal += noise.signal / noise.weight / UPDATES;
    }
    /* One estimate of T has a standard deviation below 2 T, of |G|^2 below 3. */
    CHECK(fabs(trace - variance) < 5.0 * 2.0 * variance / sqrt(UPDATES));
    CHECK(fabs(signal - mean * mean) < 5.0 * 3.0 / sqrt(UPDATES));
}

static void
test_what_cannot_be_judged_changes_nothing(void)
{
    ct_noise noise = {0};
    ct_noise_sample sample = {0};
    CHECK(!ct_noise_add(&noise, &sample, 1.0, 8.0));
    ct_noise_see(&sample, 1.0, 1.0);
    CHECK(!ct_noise_add(&noise, &sample, 1.0, 8.0));
    ct_noise_see(&sample, 1.0, NAN);
    CHECK(!ct_noise_add(&noise, &sample, 1.0, 8.0));
    CHECK(noise.weight == 0.0 && noise.trace == 0.0 && noise.signal == 0.0);
    CHECK(isinf(ct_noise_scale(&(ct_noise){.trace = 1.0, .signal = -1.0})));
}

/* ---- the norm of what a micro-batch adds ------------------------------------------
 */

typedef struct problem {
    ct_span grads[4];
    size_t n;
} problem;

static problem
problem_make(void)
{
    static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_F16};
    problem p = {.n = 4};
    for (size_t i = 0; i < 4; i++) {
        p.grads[i] = (ct_span){ct_calloc(300, 8), 100 * i, dtypes[i]};
        CHECK(p.grads[i].data != NULL);
    }
    return p;
}

/* Adds random numbers to each gradient but number `absent`; returns the sum of squares
 * of what was really added. */
static double
add(problem *p, ct_random *r, size_t absent)
{
    double sum = 0.0;
    for (size_t i = 0; i < p->n; i++) {
        const ct_span *g = &p->grads[i];
        for (size_t e = 0; e < g->n && i != absent; e++) {
            const double had = ct_load(g->dtype, g->data, e);
            ct_store(g->dtype, g->data, e, had + ct_random_unit(r));
            const double grown = ct_load(g->dtype, g->data, e) - had;
            sum += grown * grown;
        }
    }
    return sum;
}

static double
measure(ct_probe *probe, const problem *p, size_t absent)
{
    double sum = -1.0;
    for (size_t i = 0; i < p->n; i++) {
        if (i != absent) {
            CHECK(ct_probe_set(probe, i, &p->grads[i], NULL) == CT_OK);
        }
    }
    CHECK(ct_probe_measure(probe, &sum, NULL) == CT_OK);
    return sum;
}

/* Differences are rounded to float, one rounding of 2^-24 each. */
static void
test_each_micro_batch_is_measured_by_itself(void)
{
    enum {
        NONE = 9
    };
    ct_random r = {11};
    ct_probe *probe = ct_probe_new();
    CHECK(probe != NULL);
    for (int update = 0; update < 3; update++) {
        problem p = problem_make();
        ct_probe_begin(probe);
        for (int micro = 0; micro < 4; micro++) {
            const size_t absent = micro == 0 ? 2 : NONE; /* its gradient comes later */
            const double expected = add(&p, &r, absent);
            const double got = measure(probe, &p, absent);
            CHECK(fabs(got - expected) <= expected * 0x1p-22);
        }
        for (size_t i = 0; i < p.n; i++) {
            ct_free(p.grads[i].data);
        }
    }
    ct_probe_free(probe);
}

static void
test_a_bad_element_shows_and_a_new_update_forgets_it(void)
{
    float value = INFINITY;
    const ct_span grad = {&value, 1, CT_F32};
    double sum = 0.0;
    ct_probe *probe = ct_probe_new();
    CHECK(probe != NULL);
    CHECK(ct_probe_set(probe, 3, &grad, NULL) == CT_OK);
    CHECK(ct_probe_measure(probe, &sum, NULL) == CT_OK && isinf(sum));
    ct_probe_begin(probe);
    value = 3.0f;
    CHECK(ct_probe_set(probe, 3, &grad, NULL) == CT_OK);
    CHECK(ct_probe_measure(probe, &sum, NULL) == CT_OK && sum == 9.0);
    CHECK(ct_probe_measure(probe, &sum, NULL) == CT_OK && sum == 0.0);
    ct_probe_free(probe);
}

static void
test_memory_that_runs_out_is_told(void)
{
    float values[100] = {1.0f};
    const ct_span grad = {values, 100, CT_F32};
    for (size_t nth = 1; nth < 100; nth++) {
        double sum = -1.0;
        ct_alloc_fail_after(nth);
        ct_probe *probe = ct_probe_new();
        const bool done = probe != NULL &&
                          ct_probe_set(probe, 0, &grad, NULL) == CT_OK &&
                          ct_probe_measure(probe, &sum, NULL) == CT_OK;
        ct_probe_free(probe);
        ct_alloc_fail_after(0);
        if (done) {
            CHECK(nth > 5 && sum == 1.0);
            return;
        }
    }
    CHECK(false);
}

int
main(void)
{
    test_two_opposite_deviations_give_signal_and_trace();
    test_the_estimates_are_unbiased_for_micro_batches_of_unequal_sizes();
    test_what_cannot_be_judged_changes_nothing();
    test_each_micro_batch_is_measured_by_itself();
    test_a_bad_element_shows_and_a_new_update_forgets_it();
    test_memory_that_runs_out_is_told();
    return 0;
}
