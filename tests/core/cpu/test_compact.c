/* Compact state: the formulas against double, and an update of it against the same
 * update of floats, which are then quantized element by element. */
#include "core/base/alloc.h"
#include "core/device/device.h"
#include "ct_kernels.h"
#include "ct_random.h"
#include "ct_rule_examples.h"
#include "math/compact.h"

#include <math.h>
#include <string.h>

enum {
    MOST_ELEMS = 70001, /* more than a batch, and a group of 17 */
    N_SPANS = 9,
    MOST_GROUPS = MOST_ELEMS / CT_COMPACT_GROUP + 1,
    LARGEST_HALF = 0x7bff /* 65504 */
};

static const size_t lengths[N_SPANS] = {0, 1, 31, 32, 33, 512, 545, 4096, MOST_ELEMS};
static const ct_dtype dtypes[N_SPANS] = {CT_BF16, CT_F32,  CT_BF16, CT_F16, CT_BF16,
                                         CT_F32,  CT_BF16, CT_BF16, CT_BF16};

/* ---- formulas -------------------------------------------------------------------- */

static void
test_every_value_of_every_scale_is_kept(void)
{
    for (unsigned half = 1; half <= LARGEST_HALF; half++) {
        const float scale = ct_f32_from_f16((uint16_t)half);
        const float unit = ct_compact_unit(scale), inverse = ct_compact_inverse(scale);
        for (int value = -127; value <= 127; value++) {
            const float x = ct_compact_momentum((int8_t)value, scale);
            const double y = value / 127.0, exact = y / (2.0 - fabs(y)) * (double)scale;
            CHECK(fabs((double)x - exact) <= 0x1p-22 * fabs(exact));
            CHECK(ct_compact_from_momentum(x, scale) == value);
        }
        for (int value = 0; value <= 255; value++) {
            const float x = ct_compact_variance((uint8_t)value, unit);
            const double root = value / 255.0 * (double)scale;
            CHECK(fabs((double)x - root * root) <= 0x1p-21 * root * root);
            CHECK(ct_compact_from_variance(x, inverse) == value);
        }
        const float most = ct_compact_variance(255, unit);
        CHECK(ct_compact_momentum_scale(ct_bits_from_f32(scale)) == half);
        CHECK(ct_compact_root_scale(ct_bits_from_f32(most)) == half);
    }
}

/* Half a step, and the roundings of the division. */
static void
test_values_are_the_nearest(void)
{
    ct_random r = {7};
    for (int i = 0; i < 200000; i++) {
        const float scale = ct_f32_from_f16((uint16_t)(1 + ct_random_below(&r, 31743)));
        const float x = (float)(1.1 * ct_random_unit(&r) * (double)scale);
        const double inside = fmin(fmax((double)(x / scale), -1.0), 1.0);
        const double y = 2.0 * inside / (1.0 + fabs(inside));
        CHECK(fabs(ct_compact_from_momentum(x, scale) - 127.0 * y) <= 0.5 + 1e-4);
        const double root = fmin(sqrt(fabs((double)x)) / (double)scale, 1.0);
        const double value =
            ct_compact_from_variance(fabsf(x), ct_compact_inverse(scale));
        CHECK(fabs(value - 255.0 * root) <= 0.5 + 1e-4 || (value == 1.0 && x != 0.0f));
    }
}

static void
test_scales_are_positive_finite_or_nan(void)
{
    const struct {
        float x;
        unsigned nearest, below;
    } all[] = {
        {0.0f,                                        0,            0           },
        {1e-30f,                                      1,            1           },
        {0x1.8p-25f,                                  1,            1           },
        {0x1.cp-24f,                                  2,            1           },
        {0x1p-14f,                                    0x400,        0x400       },
        {0x1.0006p0f,                                 0x3c00,       0x3c00      },
        {0x1.003p0f,                                  0x3c01,       0x3c00      },
        {65504.0f,                                    LARGEST_HALF, LARGEST_HALF},
        {65520.0f,                                    LARGEST_HALF, LARGEST_HALF},
        {3e38f,                                       LARGEST_HALF, LARGEST_HALF},
        {(float)INFINITY,                             0x7e00,       0x7e00      },
        {ct_f32_from_bits(0xffc00000u & 0x7fffffffu), 0x7e00,       0x7e00      },
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        CHECK(ct_compact_scale(ct_compact_magnitude(all[i].x)) == all[i].nearest);
        CHECK(ct_compact_momentum_scale(ct_compact_magnitude(all[i].x)) ==
              all[i].below);
    }
    CHECK(ct_compact_root_scale(ct_bits_from_f32(1e-40f)) == 1);
    CHECK(ct_compact_root_scale(ct_bits_from_f32((float)INFINITY)) == 0x7e00);
    CHECK(isnan(ct_compact_momentum(0, ct_f32_from_f16(0x7e00))));
    CHECK(isnan(ct_compact_variance(0, ct_compact_unit(ct_f32_from_f16(0x7e00)))));
    for (int bad = 0; bad < 3; bad++) {
        const float x = bad == 0 ? 1.0f : bad == 1 ? (float)NAN : (float)INFINITY;
        CHECK(ct_compact_from_momentum(x, (float)NAN) == 0);
        CHECK(ct_compact_from_momentum(-x, (float)NAN) == 0);
        CHECK(ct_compact_from_variance(x, ct_compact_inverse((float)NAN)) == 0);
    }
    CHECK(ct_compact_from_momentum(0.0f, 0.0f) == 0);
    CHECK(ct_compact_from_variance(0.0f, ct_compact_inverse(0.0f)) == 0);
    CHECK(ct_compact_from_variance(1e-12f, ct_compact_inverse(1.0f)) == 1);
}

static double
half_ulp(uint16_t param)
{
    const int exponent = param >> 7 & 0xff;
    return ldexp(1.0, (exponent == 0 ? 1 : exponent) - 135);
}

/* Each correction of each bfloat16 stands for the float nearest to the formula in
 * double; of numbers below 2^-111 the product may be no normal float, and then
 * is rounded, too. */
static void
test_every_master_weight_is_that_of_the_formula(void)
{
    for (unsigned bits = 0; bits < 0x10000; bits++) {
        const uint16_t param = (uint16_t)bits;
        const double stored = (double)ct_f32_from_bf16(param);
        if (!isfinite(stored)) {
            CHECK(!isfinite(ct_compact_master(param, 0)));
            continue;
        }
        for (int c = -127; c <= 127; c++) {
            const float x = ct_compact_master(param, (int8_t)c);
            const double exact = stored + c / 127.0 * half_ulp(param);
            CHECK(half_ulp(param) >= 0x1p-119
                      ? x == (float)exact
                      : fabs((double)x - exact) <=
                            half_ulp(param) * 0x1p-16 + 0x1p-149);
            CHECK(ct_bf16_from_f32(x) != param || ct_compact_correction(x, param) == c);
        }
    }
}

/* x - stored is exact in double, and so is the product. */
static void
test_corrections_are_the_nearest(void)
{
    ct_random r = {11};
    for (int i = 0; i < 1000000; i++) {
        const float x = ct_f32_from_bits((uint32_t)ct_random_bits(&r));
        const uint16_t param = ct_bf16_from_f32(x);
        const float stored = ct_f32_from_bf16(param);
        const int c = ct_compact_correction(x, param);
        if (!isfinite(stored)) {
            CHECK(c == 0);
            continue;
        }
        const double apart = (double)x - (double)stored;
        CHECK(c == rint(apart / half_ulp(param) * 127.0));
        const double back = (double)ct_compact_master(param, (int8_t)c);
        CHECK(fabs(back - (double)x) <= half_ulp(param) * 0.00395 + 0x1p-149);
    }
}

/* ---- updates --------------------------------------------------------------------- */

typedef struct arrays {
    uint16_t grad[MOST_ELEMS];
    float param[MOST_ELEMS]; /* of any dtype */
    uint8_t state[CT_COMPACT_STATES][MOST_ELEMS];
    uint16_t scales[CT_COMPACT_STATES][MOST_GROUPS];
    int8_t correction[MOST_ELEMS];
} arrays;

typedef struct floats {
    float param[MOST_ELEMS], state[CT_COMPACT_STATES][MOST_ELEMS];
} floats;

typedef struct fixture {
    arrays *start, *expected, *memory; /* N_SPANS of each */
    floats *wide;
    ct_rule rule;
    ct_rule_coef coef;
    bool corrected;
} fixture;

static bool
is_corrected(const fixture *f, size_t s)
{
    return f->corrected && dtypes[s] == CT_BF16;
}

static ct_update_span
span_of(const fixture *f, arrays *a, size_t s)
{
    ct_update_span span = {
        .n = lengths[s],
        .grad = a->grad,
        .param = a->param,
        .correction = is_corrected(f, s) ? a->correction : NULL,
        .dtype = dtypes[s],
        .grad_dtype = CT_BF16,
        .state_dtype = CT_I8,
    };
    for (size_t k = 0; k < CT_COMPACT_STATES; k++) {
        span.state[k] = a->state[k];
        span.quant[k].scales = a->scales[k];
    }
    return span;
}

static void
run(const fixture *f, const ct_update_span *spans)
{
    ct_error err;
    const ct_update u = {
        .rule = f->rule, .coefs = &f->coef, .spans = spans, .n_spans = N_SPANS};
    if (ct_device_cpu.update(NULL, NULL, &u, &err) != CT_OK) {
        fprintf(stderr, "%s\n", err.message);
        CHECK(false);
    }
}

static void
decode(const fixture *f, const arrays *a, floats *to, size_t s)
{
    for (size_t i = 0; i < lengths[s]; i++) {
        const uint16_t *params = (const uint16_t *)(const void *)a->param;
        to->param[i] = is_corrected(f, s)
                           ? ct_compact_master(params[i], a->correction[i])
                           : (float)ct_load(dtypes[s], a->param, i);
        for (size_t k = 0; k < CT_COMPACT_STATES; k++) {
            const float scale = ct_f32_from_f16(a->scales[k][i / CT_COMPACT_GROUP]);
            to->state[k][i] =
                k == 0 ? ct_compact_momentum((int8_t)a->state[k][i], scale)
                       : ct_compact_variance(a->state[k][i], ct_compact_unit(scale));
        }
    }
}

static void
encode_group(const floats *from, arrays *a, size_t k, size_t begin, size_t n)
{
    uint32_t most = 0;
    for (size_t i = begin; i < begin + n; i++) {
        const uint32_t one = ct_compact_magnitude(from->state[k][i]);
        most = one > most ? one : most;
    }
    const uint16_t half =
        k == 0 ? ct_compact_momentum_scale(most) : ct_compact_root_scale(most);
    const float scale = ct_f32_from_f16(half);
    a->scales[k][begin / CT_COMPACT_GROUP] = half;
    for (size_t i = begin; i < begin + n; i++) {
        const float x = from->state[k][i];
        a->state[k][i] = k == 0
                             ? (uint8_t)ct_compact_from_momentum(x, scale)
                             : ct_compact_from_variance(x, ct_compact_inverse(scale));
    }
}

static void
encode(const fixture *f, const floats *from, arrays *a, size_t s)
{
    for (size_t k = 0; k < ct_rule_n_states(f->rule); k++) {
        for (size_t i = 0; i < lengths[s]; i += CT_COMPACT_GROUP) {
            const size_t left = lengths[s] - i;
            encode_group(from, a, k, i,
                         left < CT_COMPACT_GROUP ? left : CT_COMPACT_GROUP);
        }
    }
    for (size_t i = 0; i < lengths[s]; i++) {
        ct_store(dtypes[s], a->param, i, (double)from->param[i]);
        if (is_corrected(f, s)) {
            a->correction[i] =
                ct_compact_correction(from->param[i], ct_bf16_from_f32(from->param[i]));
        }
    }
}

static void
expect(fixture *f)
{
    ct_update_span spans[N_SPANS];
    memcpy(f->expected, f->start, N_SPANS * sizeof *f->start);
    for (size_t s = 0; s < N_SPANS; s++) {
        decode(f, &f->start[s], &f->wide[s], s);
        spans[s] = span_of(f, &f->expected[s], s);
        spans[s].param = f->wide[s].param;
        spans[s].dtype = spans[s].state_dtype = CT_F32;
        spans[s].correction = NULL;
        for (size_t k = 0; k < CT_COMPACT_STATES; k++) {
            spans[s].state[k] = f->wide[s].state[k];
        }
    }
    run(f, spans);
    for (size_t s = 0; s < N_SPANS; s++) {
        encode(f, &f->wide[s], &f->expected[s], s);
    }
}

static void
check_setting(void *arg)
{
    const fixture *f = arg;
    ct_update_span spans[N_SPANS];
    memcpy(f->memory, f->start, N_SPANS * sizeof *f->start);
    for (size_t s = 0; s < N_SPANS; s++) {
        spans[s] = span_of(f, &f->memory[s], s);
    }
    run(f, spans);
    CHECK(memcmp(f->memory, f->expected, N_SPANS * sizeof *f->memory) == 0);
}

/* Some groups are zero, tiny, huge, or have one bad element in their gradients. */
static void
fill(fixture *f, ct_random *r)
{
    static const double sizes[] = {1.0, 0.0, 1e-7, 1e-20, 3e4, 1e12};
    memset(f->start, 0, N_SPANS * sizeof *f->start);
    for (size_t s = 0; s < N_SPANS; s++) {
        arrays *a = &f->start[s];
        for (size_t i = 0; i < lengths[s]; i++) {
            const double size = sizes[i / CT_COMPACT_GROUP % 6];
            ct_store(CT_BF16, a->grad, i, size * ct_random_unit(r));
            ct_store(dtypes[s], a->param, i, ct_random_unit(r));
            a->correction[i] = (int8_t)((int)ct_random_below(r, 255) - 127);
            for (size_t k = 0; k < CT_COMPACT_STATES; k++) {
                a->state[k][i] = (uint8_t)ct_random_below(r, 255);
                a->scales[k][i / CT_COMPACT_GROUP] =
                    ct_f16_from_f64(fmin(0.7 * size, 60000.0));
            }
        }
    }
    ct_store(CT_BF16, f->start[8].grad, 60 * 32 + 9, NAN);
    ct_store(CT_BF16, f->start[8].grad, 72 * 32 + 31, -INFINITY);
}

static void
test_updates_equal_those_of_floats(fixture *f)
{
    static const ct_rule all[] = {
#define CT_COMPACT(rule, n_states) CT_RULE_##rule,
#include "math/compact.def"
#undef CT_COMPACT
    };
    ct_random r = {5};
    fill(f, &r);
    for (size_t i = 0; i < 2 * sizeof all / sizeof *all; i++) {
        f->rule = all[i / 2];
        f->corrected = i % 2 == 0;
        f->coef = ct_rule_example(f->rule, i % CT_RULE_VARIANTS);
        expect(f);
        ct_for_each_setting(check_setting, f);
    }
}

static void
test_a_bad_gradient_makes_its_group_nan(fixture *f)
{
    f->rule = CT_RULE_adamw;
    f->coef = ct_rule_example(f->rule, 0);
    expect(f);
    for (size_t k = 0; k < CT_COMPACT_STATES; k++) {
        for (size_t b = 0; b < MOST_GROUPS; b++) {
            const float scale = ct_f32_from_f16(f->expected[8].scales[k][b]);
            CHECK(isnan(scale) == (b == 60 || b == 72));
        }
    }
}

static void
check_rejected(ct_rule rule, const ct_update_span *span, const char *message)
{
    ct_error err;
    const ct_rule_coef coef = ct_rule_example(rule, 0);
    const ct_update u = {.rule = rule, .coefs = &coef, .spans = span, .n_spans = 1};
    CHECK(ct_device_cpu.update(NULL, NULL, &u, &err) == CT_EINVAL);
    CHECK(strstr(err.message, message) != NULL);
}

static void
test_what_cannot_be_compact_is_rejected(fixture *f)
{
    const ct_rounding rounding = {0};
    f->corrected = true;
    const ct_update_span good = span_of(f, &f->memory[6], 6);
    ct_update_span span = good;
    check_rejected(CT_RULE_lamb, &span, "lamb: span 0 has compact state");
    check_rejected(CT_RULE_nadam, &span, "which this rule cannot have");
    span.dtype = CT_F64;
    check_rejected(CT_RULE_adamw, &span, "beside parameters of float64");
    span.dtype = CT_F16;
    check_rejected(CT_RULE_adamw, &span, "corrections, which need parameters of bf");
    span = good;
    span.rounding = &rounding;
    check_rejected(CT_RULE_adamw, &span, "rounded to nearest");
    span = good;
    span.quant[1].scales = NULL;
    check_rejected(CT_RULE_adamw, &span, "scales of state array 1, which is compact");
    span = good;
    span.state_dtype = CT_F32;
    check_rejected(CT_RULE_adamw, &span, "corrections, which need compact state");
}

int
main(void)
{
    fixture f;
    f.start = ct_alloc(N_SPANS * sizeof *f.start);
    f.expected = ct_alloc(N_SPANS * sizeof *f.start);
    f.memory = ct_alloc(N_SPANS * sizeof *f.start);
    f.wide = ct_alloc(N_SPANS * sizeof *f.wide);
    CHECK(f.start != NULL && f.expected != NULL && f.memory != NULL && f.wide != NULL);
    test_every_value_of_every_scale_is_kept();
    test_values_are_the_nearest();
    test_scales_are_positive_finite_or_nan();
    test_every_master_weight_is_that_of_the_formula();
    test_corrections_are_the_nearest();
    test_updates_equal_those_of_floats(&f);
    test_a_bad_gradient_makes_its_group_nan(&f);
    test_what_cannot_be_compact_is_rejected(&f);
    ct_free(f.start);
    ct_free(f.expected);
    ct_free(f.memory);
    ct_free(f.wide);
    return 0;
}
