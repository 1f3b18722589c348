/* Cross entropy of rows against the formula with the C library's exp and log.
 *
 * With u the unit of the computation, 2^-24 or 2^-53, and |logit - largest| <= 40: the
 * subtraction and the reduction of the argument are off by at most 42 u together, the
 * polynomial and the scaling by fewer than 12, the factor by 2: a probability is within
 * 56 u of itself, so is the sum of exponentials, hence a loss within 2 * 56 u. */
#include "core/base/alloc.h"
#include "ct_kernels.h"
#include "ct_random.h"
#include "math/softmax.h"

#include <math.h>
#include <string.h>

enum {
    MOST = 3 * 1037
};

typedef struct rows {
    ct_cross_entropy work;
    char logits[MOST * 8], given[MOST * 8];
    int64_t targets[3];
    double losses[3];
} rows;

static void
fill(rows *r, ct_random *random, ct_dtype dtype, size_t classes, double smoothing)
{
    r->work = (ct_cross_entropy){.dtype = dtype,
                                 .rows = 3,
                                 .classes = classes,
                                 .stride = classes + 3,
                                 .logits = r->logits,
                                 .targets = r->targets,
                                 .losses = r->losses,
                                 .smoothing = smoothing,
                                 .scale = 0.75,
                                 .gradient = true};
    for (size_t i = 0; i < 3 * r->work.stride; i++) {
        ct_store(dtype, r->given, i, 20.0 * ct_random_unit(random) - 10.0);
    }
    for (size_t i = 0; i < 3; i++) {
        r->targets[i] = (int64_t)(i * (classes - 1) / 2);
    }
}

static ct_status
run(rows *r, ct_error *err)
{
    memcpy(r->logits, r->given, sizeof r->given);
    return ct_device_cpu.cross_entropy(NULL, &r->work, err);
}

static double
unit_of(ct_dtype dtype)
{
    return dtype == CT_F32    ? 0x1p-24
           : dtype == CT_F64  ? 0x1p-53
           : dtype == CT_BF16 ? 0x1p-8
                              : 0x1p-11;
}

/* The formula in long double, which adds nothing to the bounds of double. */
static void
check_row(const rows *r, size_t row)
{
    const ct_cross_entropy *w = &r->work;
    const double u = w->dtype == CT_F64 ? 0x1p-53 : 0x1p-24;
    const long double n = (long double)w->classes, smoothing = w->smoothing;
    const size_t first = row * w->stride;
    long double sum = 0.0L, expected = 0.0L;
    for (size_t i = 0; i < w->classes; i++) {
        sum += expl((long double)ct_load(w->dtype, r->given, first + i));
    }
    for (size_t i = 0; i < w->classes; i++) {
        const long double x = (long double)ct_load(w->dtype, r->given, first + i);
        const bool is_target = (int64_t)i == w->targets[row];
        const long double weight =
            smoothing / n + (is_target ? 1.0L - smoothing : 0.0L);
        const long double p = expl(x) / sum;
        const double grad = (double)((p - weight) * (long double)w->scale);
        const double near = w->scale * u * (60.0 * (double)p + 2.0 * (double)weight) +
                            unit_of(w->dtype) * fabs(grad) + 0x1p-25 * (u > 0x1p-30);
        expected += weight * (logl(sum) - x);
        CHECK(fabs(ct_load(w->dtype, r->logits, first + i) - grad) <= near);
    }
    CHECK(fabs(r->losses[row] - (double)expected) <= 112.0 * u);
    for (size_t i = first + w->classes; i < first + w->stride; i++) {
        CHECK(ct_load(w->dtype, r->logits, i) == ct_load(w->dtype, r->given, i));
    }
}

typedef struct same {
    rows *r;
    char logits[MOST * 8];
    double losses[3];
} same;

static void
check_same(void *arg)
{
    same *s = arg;
    CHECK(run(s->r, NULL) == CT_OK);
    CHECK(memcmp(s->logits, s->r->logits, sizeof s->logits) == 0);
    CHECK(memcmp(s->losses, s->r->losses, sizeof s->losses) == 0);
}

static void
test_losses_and_gradients_are_the_formulas_in_any_setting(void)
{
    static const size_t classes[] = {1, 2, 31, 32, 33, 1000};
    static rows r;
    static same s;
    ct_random random = {3};
    for (ct_dtype dtype = CT_F32; dtype <= CT_F16; dtype++) {
        for (size_t i = 0; i < 12; i++) {
            fill(&r, &random, dtype, classes[i / 2], i % 2 != 0 ? 0.1 : 0.0);
            CHECK(run(&r, NULL) == CT_OK);
            for (size_t row = 0; row < 3; row++) {
                check_row(&r, row);
            }
            s.r = &r;
            memcpy(s.logits, r.logits, sizeof s.logits);
            memcpy(s.losses, r.losses, sizeof s.losses);
            ct_for_each_setting(check_same, &s);
        }
    }
}

static void
test_without_gradient_the_logits_stay(void)
{
    static rows r;
    ct_random random = {4};
    fill(&r, &random, CT_F32, 50, 0.2);
    CHECK(run(&r, NULL) == CT_OK);
    const double loss = r.losses[1];
    r.work.gradient = false;
    CHECK(run(&r, NULL) == CT_OK);
    CHECK(memcmp(r.logits, r.given, sizeof r.given) == 0 && r.losses[1] == loss);
}

/* Many rows are batches of several, the last of fewer. */
static void
test_every_row_of_many_is_computed(void)
{
    enum {
        ROWS = 20011
    };
    float *logits = ct_calloc(ROWS * 10, sizeof(float));
    int64_t *targets = ct_calloc(ROWS, sizeof(int64_t));
    double *losses = ct_calloc(ROWS, sizeof(double));
    const ct_cross_entropy work = {.dtype = CT_F32,
                                   .rows = ROWS,
                                   .classes = 10,
                                   .stride = 10,
                                   .logits = logits,
                                   .targets = targets,
                                   .losses = losses,
                                   .scale = 1.0,
                                   .gradient = true};
    CHECK(ct_pool_set_threads(3, NULL) == CT_OK);
    CHECK(ct_device_cpu.cross_entropy(NULL, &work, NULL) == CT_OK);
    for (size_t i = 0; i < ROWS; i++) {
        CHECK(fabs(losses[i] - log(10.0)) < 1e-12);
        CHECK(logits[10 * i] == -0.9f && logits[10 * i + 9] == 0.1f);
    }
    ct_free(logits);
    ct_free(targets);
    ct_free(losses);
}

static void
test_masked_logits_have_no_probability_and_nan_spreads(void)
{
    static rows r;
    ct_random random = {5};
    fill(&r, &random, CT_F32, 40, 0.0);
    for (size_t i = 20; i < 40; i++) {
        ct_store(CT_F32, r.given, i, -INFINITY);             /* half of row 0 */
        ct_store(CT_F32, r.given, r.work.stride + i, -1e30); /* of row 1 */
    }
    ct_store(CT_F32, r.given, 2 * r.work.stride + 33, NAN);
    CHECK(run(&r, NULL) == CT_OK);
    CHECK(isfinite(r.losses[0]) && isfinite(r.losses[1]) && isnan(r.losses[2]));
    for (size_t i = 20; i < 40; i++) {
        CHECK(ct_load(CT_F32, r.logits, i) == 0.0);
        CHECK(ct_load(CT_F32, r.logits, r.work.stride + i) == 0.0);
        CHECK(isnan(ct_load(CT_F32, r.logits, 2 * r.work.stride + i)));
    }
    r.targets[0] = 30; /* a class without probability */
    CHECK(run(&r, NULL) == CT_OK);
    CHECK(r.losses[0] == (double)INFINITY && ct_load(CT_F32, r.logits, 30) == -0.75);
}

static void
test_a_target_of_no_class_is_named_and_nothing_written(void)
{
    static rows r;
    ct_random random = {6};
    ct_error err;
    fill(&r, &random, CT_BF16, 7, 0.0);
    static const int64_t wrong[] = {-1, 7, INT64_MIN};
    for (size_t i = 0; i < 3; i++) {
        r.targets[2] = wrong[i];
        CHECK(run(&r, &err) == CT_EINVAL);
        char text[80];
        (void)snprintf(text, sizeof text, "the target of row 2 is %lld; expected a",
                       (long long)wrong[i]);
        CHECK(strstr(err.message, text) != NULL);
        CHECK(memcmp(r.logits, r.given, sizeof r.given) == 0);
    }
    r.work.dtype = CT_I32;
    CHECK(run(&r, &err) == CT_EINVAL && strstr(err.message, "int32") != NULL);
}

/* Every 97th float from -90 to 0, within 2 ulps. */
static void
test_exponentials_are_within_two_ulps(void)
{
    for (uint32_t bits = 0x80000000u; bits < 0xc2b40000u; bits += 97) {
        const float x = ct_f32_from_bits(bits);
        const double expected = exp((double)x), got = (double)ct_exp_below_f32(x);
        CHECK(x < -87.33f ? got == 0.0 : fabs(got - expected) <= 0x1p-22 * expected);
    }
    for (int i = 0; i < 70000; i++) {
        const double x = -0.0101 * i, expected = exp(x);
        CHECK(fabs(ct_exp_below_f64(x) - expected) <= 0x1p-51 * expected);
    }
    CHECK(ct_exp_below_f32(-INFINITY) == 0.0f && isnan(ct_exp_below_f32(NAN)));
    CHECK(ct_exp_below_f64(-1e300) == 0.0 && isnan(ct_exp_below_f64((double)NAN)));
}

int
main(void)
{
    test_losses_and_gradients_are_the_formulas_in_any_setting();
    test_without_gradient_the_logits_stay();
    test_every_row_of_many_is_computed();
    test_masked_logits_have_no_probability_and_nan_spreads();
    test_a_target_of_no_class_is_named_and_nothing_written();
    test_exponentials_are_within_two_ulps();
    return 0;
}
