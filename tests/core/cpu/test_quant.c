/* 8-bit state: an update of it leaves the parameters and, once they are quantised
 * by plain loops, the state of the same update of floats. */
#include "core/base/alloc.h"
#include "cpu/quant_search.h"
#include "ct_kernels.h"
#include "ct_random.h"
#include "ct_rule_examples.h"
#include "math/quant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_SPANS = 7,
    MOST_ELEMS = 70000, /* elements: more than a batch */
    MAPS = 3
};

static const size_t lengths[N_SPANS] = {0, 1, 255, 256, 257, 4096, MOST_ELEMS};
static const ct_dtype dtypes[N_SPANS] = {CT_F32, CT_F64, CT_F32, CT_BF16,
                                         CT_F16, CT_F64, CT_F32};

typedef struct arrays {
    double grad[MOST_ELEMS], param[MOST_ELEMS];
    double state[CT_RULE_MAX_STATES][MOST_ELEMS]; /* of the type that is computed in */
    uint8_t quantized[CT_RULE_MAX_STATES][MOST_ELEMS];
    float absmax[CT_RULE_MAX_STATES][MOST_ELEMS / CT_QUANT_BLOCK + 1];
} arrays;

typedef struct fixture {
    float maps[MAPS][CT_QUANT_MAP_SIZE];
    arrays *start, *expected, *memory; /* N_SPANS of each */
    ct_rule rule;
    ct_rule_coef coef;
} fixture;

/* ---- maps ------------------------------------------------------------------------ */

static int
compare_floats(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Fractions that double in number from decade to decade. */
static void
make_dynamic_map(float *map, bool is_signed)
{
    size_t n = 0;
    for (int e = 0; e < 7; e++) {
        const int items = 1 << (is_signed ? e : e + 1);
        for (int i = 0; i < items; i++) {
            const double fraction = 0.1 + 0.9 * (i + 0.5) / items;
            map[n++] = (float)(fraction * pow(10.0, e - 6));
            if (is_signed) {
                map[n] = -map[n - 1];
                n++;
            }
        }
    }
    map[n++] = 0.0f;
    map[n++] = 1.0f;
    CHECK(n == CT_QUANT_MAP_SIZE);
    qsort(map, n, sizeof *map, compare_floats);
}

/* Half of the numbers within a hundredth of 0.5: many in one bucket; one comes twice.
 */
static void
make_crowded_map(float *map, ct_random *r)
{
    for (size_t i = 0; i < CT_QUANT_MAP_SIZE; i++) {
        const double x = ct_random_unit(r);
        map[i] = (float)(i % 2 == 0 ? x : 0.5 + 0.01 * x);
    }
    map[7] = map[8];
    qsort(map, CT_QUANT_MAP_SIZE, sizeof *map, compare_floats);
}

/* ---- plain loops ----------------------------------------------------------------- */

static const float *
map_of(const fixture *f, size_t span, size_t k)
{
    return f->maps[(span % 2 + k) % MAPS];
}

static double
real_of(const arrays *a, ct_dtype dtype, size_t k, size_t i)
{
    return dtype == CT_F64 ? a->state[k][i]
                           : (double)((const float *)(const void *)a->state[k])[i];
}

static void
set_real(arrays *a, ct_dtype dtype, size_t k, size_t i, double x)
{
    if (dtype == CT_F64) {
        a->state[k][i] = x;
    }
    else {
        ((float *)(void *)a->state[k])[i] = (float)x;
    }
}

/* The first of the nearest numbers, by looking at every one. */
static uint8_t
nearest(const float *map, float unit)
{
    size_t best = 0;
    for (size_t i = 1; i < CT_QUANT_MAP_SIZE; i++) {
        best = unit > ct_quant_middle(map[i - 1], map[i]) ? i : best;
    }
    return (uint8_t)best;
}

static void
quantise_block(arrays *a, ct_dtype dtype, const float *map, size_t k, size_t from,
               size_t n)
{
    float absmax = 0.0f;
    for (size_t i = from; i < from + n; i++) {
        const float x = fabsf((float)real_of(a, dtype, k, i));
        absmax = isnan(absmax) || x <= absmax ? absmax : x;
    }
    const bool finite = absmax < INFINITY;
    a->absmax[k][from / CT_QUANT_BLOCK] = finite ? absmax : NAN;
    for (size_t i = from; i < from + n; i++) {
        const float unit = finite ? ct_quant_unit((float)real_of(a, dtype, k, i),
                                                  ct_quant_scale(absmax))
                                  : 0.0f;
        a->quantized[k][i] = nearest(map, unit);
    }
}

static void
dequantise(const fixture *f, arrays *a, size_t span, size_t k)
{
    for (size_t i = 0; i < lengths[span]; i++) {
        const float absmax = a->absmax[k][i / CT_QUANT_BLOCK];
        set_real(a, dtypes[span], k, i,
                 (double)(map_of(f, span, k)[a->quantized[k][i]] * absmax));
    }
}

/* ---- updates --------------------------------------------------------------------- */

static ct_update_span
span_of(const fixture *f, arrays *a, size_t s, bool quantized)
{
    ct_update_span span = {
        .n = lengths[s],
        .grad = a->grad,
        .param = a->param,
        .dtype = dtypes[s],
        .grad_dtype = CT_F32,
        .state_dtype =
            quantized ? CT_U8 : ct_update_real(&(ct_update_span){.dtype = dtypes[s]}),
    };
    for (size_t k = 0; k < CT_RULE_MAX_STATES; k++) {
        span.state[k] = quantized ? (void *)a->quantized[k] : (void *)a->state[k];
        span.quant[k] = (ct_quant){.map = map_of(f, s, k), .absmax = a->absmax[k]};
    }
    return span;
}

static void
update(const fixture *f, arrays *all, bool quantized)
{
    ct_update_span spans[N_SPANS];
    ct_error err;
    for (size_t s = 0; s < N_SPANS; s++) {
        spans[s] = span_of(f, &all[s], s, quantized);
    }
    const ct_update u = {
        .rule = f->rule, .coefs = &f->coef, .spans = spans, .n_spans = N_SPANS};
    if (ct_device_cpu.update(NULL, NULL, &u, &err) != CT_OK) {
        fprintf(stderr, "%s\n", err.message);
        CHECK(false);
    }
}

static void
expect(fixture *f)
{
    const size_t n_states = ct_rule_n_states(f->rule);
    memcpy(f->expected, f->start, N_SPANS * sizeof *f->start);
    for (size_t s = 0; s < N_SPANS; s++) {
        for (size_t k = 0; k < n_states; k++) {
            dequantise(f, &f->expected[s], s, k);
        }
    }
    update(f, f->expected, false);
    for (size_t s = 0; s < N_SPANS; s++) {
        for (size_t k = 0; k < n_states; k++) {
            for (size_t i = 0; i < lengths[s]; i += CT_QUANT_BLOCK) {
                const size_t left = lengths[s] - i;
                quantise_block(&f->expected[s], dtypes[s], map_of(f, s, k), k, i,
                               left < CT_QUANT_BLOCK ? left : CT_QUANT_BLOCK);
            }
        }
    }
}

/* Every byte but those of the states as floats, which this update has not. */
static void
check_setting(void *arg)
{
    const fixture *f = arg;
    memcpy(f->memory, f->start, N_SPANS * sizeof *f->start);
    update(f, f->memory, true);
    for (size_t s = 0; s < N_SPANS; s++) {
        const arrays *got = &f->memory[s], *wanted = &f->expected[s];
        CHECK(memcmp(got->param, wanted->param, sizeof got->param) == 0);
        CHECK(memcmp(got->quantized, wanted->quantized, sizeof got->quantized) == 0);
        CHECK(memcmp(got->absmax, wanted->absmax, sizeof got->absmax) == 0);
    }
}

/* Some blocks are zero, tiny, or have one bad element in their gradients. */
static void
fill_spans(fixture *f, ct_random *r)
{
    memset(f->start, 0, N_SPANS * sizeof *f->start);
    for (size_t s = 0; s < N_SPANS; s++) {
        arrays *a = &f->start[s];
        for (size_t i = 0; i < lengths[s]; i++) {
            const size_t kind = i / CT_QUANT_BLOCK % 16;
            const double size = kind == 3 ? 0.0 : kind == 5 ? 1e-21 : 1.0;
            ((float *)(void *)a->grad)[i] = (float)(size * ct_random_unit(r));
            ct_store(dtypes[s], a->param, i, ct_random_unit(r));
            for (size_t k = 0; k < CT_RULE_MAX_STATES; k++) {
                /* not negative: it may be a second moment */
                a->quantized[k][i] = (uint8_t)(128 + ct_random_below(r, 128));
                a->absmax[k][i / CT_QUANT_BLOCK] = (float)(size * 0.7);
            }
        }
    }
    ((float *)(void *)f->start[6].grad)[7 * 256 + 9] = NAN;
    ((float *)(void *)f->start[6].grad)[9 * 256 + 200] = -INFINITY;
}

static void
test_updates_of_codes_equal_those_of_floats(fixture *f)
{
    ct_random r = {5};
    fill_spans(f, &r);
    for (int rule = 0; rule < CT_RULE_COUNT; rule++) {
        f->rule = (ct_rule)rule;
        if (ct_rule_is_measured(f->rule) || ct_rule_n_states(f->rule) == 0) {
            continue;
        }
        f->coef = ct_rule_example(f->rule, (size_t)rule % CT_RULE_VARIANTS);
        expect(f);
        ct_for_each_setting(check_setting, f);
    }
}

static void
test_a_bad_gradient_makes_its_block_nan(fixture *f)
{
    f->rule = CT_RULE_adamw;
    f->coef = ct_rule_example(f->rule, 0);
    memcpy(f->memory, f->start, N_SPANS * sizeof *f->start);
    update(f, f->memory, true);
    for (size_t k = 0; k < 2; k++) {
        for (size_t b = 0; b < 16; b++) {
            CHECK(isnan(f->memory[6].absmax[k][b]) == (b == 7 || b == 9));
        }
    }
}

/* By distances in double; the middle itself is rounded, by less than 2^-24. */
static void
test_the_nearest_number_is_found(const fixture *f)
{
    ct_random r = {9};
    for (size_t m = 0; m < MAPS; m++) {
        float middles[CT_QUANT_MAP_SIZE - 1];
        for (size_t i = 0; i + 1 < CT_QUANT_MAP_SIZE; i++) {
            middles[i] = ct_quant_middle(f->maps[m][i], f->maps[m][i + 1]);
        }
        for (int i = 0; i < 20000; i++) {
            const double x = (double)(float)(ct_random_unit(&r) * pow(10.0, -(i % 8)));
            const uint32_t value = ct_quant_nearest(middles, (float)x);
            double best = 2.0;
            for (size_t c = 0; c < CT_QUANT_MAP_SIZE; c++) {
                best = fmin(best, fabs(x - (double)f->maps[m][c]));
            }
            CHECK(fabs(x - (double)f->maps[m][value]) <= best + 0x1p-23 * fabs(x));
        }
    }
}

/* The quick search is for maps without two middles in a bucket; the others' updates are
 * tested all the same. */
static void
test_dynamic_maps_are_searched_directly(const fixture *f)
{
    static quant_searches searches;
    ct_update_span span = {.n = 1};
    for (size_t m = 0; m < MAPS; m++) {
        span.quant[m].map = f->maps[m];
    }
    quant_searches_init(&searches);
    CHECK(!quant_fits(&searches, &span, MAPS));
    quant_prepare(&searches, &span, MAPS);
    CHECK(quant_fits(&searches, &span, MAPS));
    CHECK(searches.of[0].direct && searches.of[1].direct && !searches.of[2].direct);
}

static ct_status
rejected(const fixture *f, ct_rule rule, ct_update_span span, ct_error *err)
{
    const ct_rule_coef coef = ct_rule_example(rule, 0);
    const ct_update u = {.rule = rule, .coefs = &coef, .spans = &span, .n_spans = 1};
    (void)f;
    return ct_device_cpu.update(NULL, NULL, &u, err);
}

static void
test_what_cannot_have_codes_is_rejected(fixture *f)
{
    ct_error err;
    ct_update_span span = span_of(f, f->memory, 2, true);
    CHECK(rejected(f, CT_RULE_lamb, span, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "lamb: span 0 has state of uint8") != NULL);
    span.quant[1].absmax = NULL;
    CHECK(rejected(f, CT_RULE_adamw, span, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "scales of state array 1") != NULL);
}

int
main(void)
{
    ct_random r = {3};
    fixture f;
    make_dynamic_map(f.maps[0], true);
    make_dynamic_map(f.maps[1], false);
    make_crowded_map(f.maps[2], &r);
    f.start = ct_alloc(N_SPANS * sizeof *f.start);
    f.expected = ct_alloc(N_SPANS * sizeof *f.start);
    f.memory = ct_alloc(N_SPANS * sizeof *f.start);
    CHECK(f.start != NULL && f.expected != NULL && f.memory != NULL);
    test_updates_of_codes_equal_those_of_floats(&f);
    test_a_bad_gradient_makes_its_block_nan(&f);
    test_the_nearest_number_is_found(&f);
    test_dynamic_maps_are_searched_directly(&f);
    test_what_cannot_have_codes_is_rejected(&f);
    ct_free(f.start);
    ct_free(f.expected);
    ct_free(f.memory);
    return 0;
}
