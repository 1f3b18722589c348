/* Random lists of spans through every elementwise kernel: the memory afterwards, gaps
 * between the spans included, must equal byte for byte what plain loops over the
 * formulas leave, whatever the instruction set and the number of threads. */
#include "core/base/alloc.h"
#include "ct_kernels.h"
#include "ct_random.h"
#include "ct_rule_examples.h"
#include "math/ema.h"
#include "math/philox.h"

#include <math.h>
#include <string.h>

enum {
    MOST_SPANS = 40,
#ifdef __SANITIZE_THREAD__
    LISTS = 4, /* each takes minutes; what counts is that threads meet */
#else
    LISTS = 31,
#endif
    RULES_OF_A_LIST = 3,
    GRAD = 0,
    PARAM,
    COPY,
    EMA,
    STATE, /* and those behind it */
    ROLES = STATE + CT_RULE_MAX_STATES
};

typedef struct slot {
    size_t at[ROLES]; /* bytes into the arena of each role */
    ct_dtype dtype[ROLES];
    size_t n;
    uint64_t first;
    uint32_t coef;
    bool has_copy, has_ema, rounds;
} slot;

typedef struct list {
    slot slots[MOST_SPANS];
    size_t n_slots, bytes;
    char *start[ROLES]; /* what every run begins with */
    char *expected[ROLES];
    char *memory[ROLES]; /* of the run */
    ct_rule rule;
    ct_rule_coef coefs[CT_RULE_VARIANTS];
    bool zero_grads;
} list;

static const double ema_decay = 0.7;
static const ct_rounding rounding = {11, 5};
static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_F16};

static size_t
random_length(ct_random *r)
{
    static const size_t edges[] = {0, 0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 1023};
    const size_t kind = ct_random_below(r, 20);
    if (kind < 13) {
        return edges[kind];
    }
    return ct_random_below(r, kind == 19 ? 200000 : 3000);
}

/* Half of the spans are of one dtype; in the others every role has its own, but for
 * the states, which share one. */
static void
draw_slot(slot *s, ct_random *r)
{
    const ct_dtype one = dtypes[ct_random_below(r, 4)];
    const ct_dtype state = dtypes[ct_random_below(r, 4)];
    const bool mixed = ct_random_below(r, 2) != 0;
    s->n = random_length(r);
    s->coef = (uint32_t)ct_random_below(r, CT_RULE_VARIANTS);
    s->has_copy = ct_random_below(r, 3) == 0;
    s->has_ema = ct_random_below(r, 3) == 0;
    s->rounds = ct_random_below(r, 2) != 0;
    for (int k = 0; k < ROLES; k++) {
        s->dtype[k] = !mixed ? one : k >= STATE ? state : dtypes[ct_random_below(r, 4)];
    }
}

/* Lays the spans out one after another with gaps, aligned to their element and to
 * nothing more; the roles get different gaps. */
static void
lay_out(list *l, ct_random *r)
{
    size_t end[ROLES] = {0};
    uint64_t first = 0;
    l->n_slots = 1 + ct_random_below(r, MOST_SPANS);
    for (size_t i = 0; i < l->n_slots; i++) {
        slot *s = &l->slots[i];
        draw_slot(s, r);
        s->first = first;
        first += (s->n + 7) / 8 * 8;
        for (int k = 0; k < ROLES; k++) {
            const size_t size = ct_dtype_size(s->dtype[k]);
            s->at[k] = (end[k] / size + 1 + ct_random_below(r, 5)) * size;
            end[k] = s->at[k] + s->n * size;
        }
    }
    l->bytes = 0;
    for (int k = 0; k < ROLES; k++) {
        l->bytes = end[k] > l->bytes ? end[k] : l->bytes;
    }
    l->bytes += 64;
}

/* State is not negative: it may be a second moment. */
static void
fill(list *l, ct_random *r)
{
    for (int k = 0; k < ROLES; k++) {
        l->start[k] = ct_alloc(l->bytes);
        l->expected[k] = ct_alloc(l->bytes);
        l->memory[k] = ct_alloc(l->bytes);
        memset(l->start[k], 0x5a, l->bytes);
        for (size_t i = 0; i < l->n_slots; i++) {
            const slot *s = &l->slots[i];
            for (size_t e = 0; e < s->n; e++) {
                const double x = ct_random_unit(r);
                ct_store(s->dtype[k], l->start[k] + s->at[k], e,
                         k >= STATE ? x * x : x);
            }
        }
    }
}

static list
list_make(ct_random *r)
{
    list l = {.zero_grads = ct_random_below(r, 2) != 0};
    lay_out(&l, r);
    fill(&l, r);
    return l;
}

static void
list_free(list *l)
{
    for (int k = 0; k < ROLES; k++) {
        ct_free(l->start[k]);
        ct_free(l->expected[k]);
        ct_free(l->memory[k]);
    }
}

static void
reset(list *l, char *const *memory)
{
    for (int k = 0; k < ROLES; k++) {
        memcpy(memory[k], l->start[k], l->bytes);
    }
}

static void
check_equals_expected(const list *l)
{
    for (int k = 0; k < ROLES; k++) {
        CHECK(memcmp(l->memory[k], l->expected[k], l->bytes) == 0);
    }
}

/* What a rule makes of one element in either type. */
static void
apply(const list *l, uint32_t coef, bool wide, double grad, double *param,
      double *state)
{
    const ct_rule_coef *c = &l->coefs[coef];
    float param32 = (float)*param, state32[CT_RULE_MAX_STATES];
    for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
        state32[k] = (float)state[k];
    }
    switch (l->rule) {
#define CT_RULE(rule, constants, n_states)                                             \
    case CT_RULE_##rule: {                                                             \
        const ct_##constants##_coef_f64 c64 = ct_##constants##_round_f64(&c->rule);    \
        const ct_##constants##_coef_f32 c32 = ct_##constants##_round_f32(&c->rule);    \
        if (wide) {                                                                    \
            ct_##rule##_apply_f64(&c64, grad, param, state);                           \
            return;                                                                    \
        }                                                                              \
        ct_##rule##_apply_f32(&c32, (float)grad, &param32, state32);                   \
        break;                                                                         \
    }
#include "math/rules.def"
#undef CT_RULE
    default:
        CHECK(false);
    }
    *param = (double)param32;
    for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
        state[k] = (double)state32[k];
    }
}

static void
store_rounded(const slot *s, int role, char *to, size_t e, double value)
{
    if (s->rounds && s->dtype[role] == CT_BF16) {
        uint32_t words[4];
        ct_philox_block(rounding.seed, rounding.step, s->first + e, words);
        ((uint16_t *)(void *)to)[e] = ct_bf16_from_f32_stochastic(
            (float)value, ct_philox_half(words, s->first + e));
    }
    else {
        ct_store(s->dtype[role], to, e, value);
    }
}

static void
expect_element(list *l, const slot *s, size_t e)
{
    const bool wide = s->dtype[PARAM] == CT_F64;
    const ct_ema_coef average = ct_ema_coef_of(ema_decay);
    char *at[ROLES];
    double x[ROLES];
    for (int k = 0; k < ROLES; k++) {
        at[k] = l->expected[k] + s->at[k];
        x[k] = ct_load(s->dtype[k], at[k], e);
        x[k] = wide ? x[k] : (double)(float)x[k];
    }
    apply(l, s->coef, wide, x[GRAD], &x[PARAM], &x[STATE]);
    for (size_t k = 0; k < ct_rule_n_states(l->rule); k++) {
        ct_store(s->dtype[STATE + k], at[STATE + k], e, x[STATE + k]);
    }
    store_rounded(s, PARAM, at[PARAM], e, x[PARAM]);
    if (s->has_copy) {
        store_rounded(s, COPY, at[COPY], e, x[PARAM]);
    }
    if (s->has_ema) {
        const int source = s->has_copy ? COPY : PARAM;
        const double stored = ct_load(s->dtype[source], at[source], e);
        const double narrow =
            (double)ct_ema_apply_f32(&average, (float)x[EMA], (float)stored);
        ct_store(s->dtype[EMA], at[EMA], e,
                 wide ? ct_ema_apply_f64(&average, x[EMA], stored) : narrow);
    }
    if (l->zero_grads) {
        ct_store(s->dtype[GRAD], at[GRAD], e, 0.0);
    }
}

static void
expect_update(list *l)
{
    reset(l, l->expected);
    for (size_t i = 0; i < l->n_slots; i++) {
        for (size_t e = 0; e < l->slots[i].n; e++) {
            expect_element(l, &l->slots[i], e);
        }
    }
}

static ct_update_span
update_span_of(const list *l, const slot *s)
{
    ct_update_span span = {
        .n = s->n,
        .grad = l->memory[GRAD] + s->at[GRAD],
        .param = l->memory[PARAM] + s->at[PARAM],
        .copy = s->has_copy ? l->memory[COPY] + s->at[COPY] : NULL,
        .ema = s->has_ema ? l->memory[EMA] + s->at[EMA] : NULL,
        .dtype = s->dtype[PARAM],
        .grad_dtype = s->dtype[GRAD],
        .state_dtype = s->dtype[STATE],
        .copy_dtype = s->dtype[COPY],
        .ema_dtype = s->dtype[EMA],
        .coef = s->coef,
        .rounding = s->rounds ? &rounding : NULL,
        .first = s->first,
    };
    for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
        span.state[k] = l->memory[STATE + k] + s->at[STATE + k];
    }
    return span;
}

static void
check_update(void *arg)
{
    list *l = arg;
    ct_update_span spans[MOST_SPANS];
    reset(l, l->memory);
    for (size_t i = 0; i < l->n_slots; i++) {
        spans[i] = update_span_of(l, &l->slots[i]);
    }
    const ct_update update = {
        .rule = l->rule,
        .coefs = l->coefs,
        .spans = spans,
        .n_spans = l->n_slots,
        .zero_grads = l->zero_grads,
        .ema_decay = ema_decay,
    };
    CHECK(ct_device_cpu.update(NULL, NULL, &update, NULL) == CT_OK);
    check_equals_expected(l);
}

/* Some rules for each list, in turn: the lists together have them all, several times.
 */
static void
check_some_rules(list *l, int round)
{
    for (int k = 0; k < RULES_OF_A_LIST; k++) {
        l->rule = (ct_rule)((round * RULES_OF_A_LIST + k) % CT_RULE_COUNT);
        for (size_t c = 0; c < CT_RULE_VARIANTS; c++) {
            l->coefs[c] = ct_rule_example(l->rule, c);
        }
        expect_update(l);
        ct_for_each_setting(check_update, l);
    }
}

static void
spans_of(const list *l, int role, ct_span *spans)
{
    for (size_t i = 0; i < l->n_slots; i++) {
        const slot *s = &l->slots[i];
        spans[i] = (ct_span){l->memory[role] + s->at[role], s->n, s->dtype[role]};
    }
}

/* EMA takes in PARAM. */
static void
expect_average(list *l)
{
    const ct_ema_coef coef = ct_ema_coef_of(ema_decay);
    reset(l, l->expected);
    for (size_t i = 0; i < l->n_slots; i++) {
        const slot *s = &l->slots[i];
        char *at = l->expected[EMA] + s->at[EMA];
        for (size_t e = 0; e < s->n; e++) {
            const double x =
                ct_load(s->dtype[PARAM], l->expected[PARAM] + s->at[PARAM], e);
            const double old = ct_load(s->dtype[EMA], at, e);
            const double narrow = (double)ct_ema_apply_f32(&coef, (float)old, (float)x);
            ct_store(s->dtype[EMA], at, e,
                     s->dtype[PARAM] == CT_F64 ? ct_ema_apply_f64(&coef, old, x)
                                               : narrow);
        }
    }
}

static void
check_average(void *arg)
{
    list *l = arg;
    ct_span averages[MOST_SPANS], values[MOST_SPANS];
    reset(l, l->memory);
    spans_of(l, EMA, averages);
    spans_of(l, PARAM, values);
    CHECK(ct_device_cpu.average(NULL, averages, values, l->n_slots, ema_decay, NULL) ==
          CT_OK);
    check_equals_expected(l);
}

/* Scales role 0 and zeroes role 1. */
static void
expect_scale_and_zero(list *l)
{
    reset(l, l->expected);
    for (size_t i = 0; i < l->n_slots; i++) {
        const slot *s = &l->slots[i];
        for (size_t e = 0; e < s->n; e++) {
            const double x = ct_load(s->dtype[0], l->expected[0] + s->at[0], e);
            const bool wide = s->dtype[0] == CT_F64;
            const double product = wide ? x * 0.3 : (double)((float)x * 0.3f);
            const double most = wide ? 0.1 : (double)0.1f;
            ct_store(s->dtype[0], l->expected[0] + s->at[0], e,
                     fmax(-most, fmin(most, product)));
            ct_store(s->dtype[1], l->expected[1] + s->at[1], e, 0.0);
        }
    }
}

static void
check_scale_and_zero(void *arg)
{
    list *l = arg;
    ct_span spans[MOST_SPANS];
    reset(l, l->memory);
    spans_of(l, 0, spans);
    CHECK(ct_device_cpu.scale(NULL, 0.3, 0.1, spans, l->n_slots, NULL) == CT_OK);
    spans_of(l, 1, spans);
    CHECK(ct_device_cpu.zero(NULL, spans, l->n_slots, NULL) == CT_OK);
    check_equals_expected(l);
}

static void
test_random_lists_equal_plain_loops_over_the_formulas(void)
{
    ct_random r = {2024};
    for (int round = 0; round < LISTS; round++) {
        list l = list_make(&r);
        check_some_rules(&l, round);
        expect_average(&l);
        ct_for_each_setting(check_average, &l);
        expect_scale_and_zero(&l);
        ct_for_each_setting(check_scale_and_zero, &l);
        list_free(&l);
    }
}

static void
check_limits(void *arg)
{
    static const double values[] = {0.25, 1.0, -1.0, INFINITY, -INFINITY, NAN, -0.0};
    static const double clipped[] = {0.5, 0.75, -0.75, 0.75, -0.75, NAN, -0.0};
    enum {
        N = sizeof values / sizeof *values
    };
    double memory[N];
    const ct_dtype dtype = *(const ct_dtype *)arg;
    const ct_span span = {memory, N, dtype};
    for (size_t i = 0; i < N; i++) {
        ct_store(dtype, memory, i, values[i]);
    }
    CHECK(ct_device_cpu.scale(NULL, 2.0, 0.75, &span, 1, NULL) == CT_OK);
    for (size_t i = 0; i < N; i++) {
        const double got = ct_load(dtype, memory, i);
        CHECK(isnan(clipped[i]) ? isnan(got) : got == clipped[i]);
    }
}

static void
test_scaling_stops_at_the_limit_and_keeps_nan(void)
{
    for (size_t d = 0; d < 4; d++) {
        ct_dtype dtype = dtypes[d];
        ct_for_each_setting(check_limits, &dtype);
    }
}

_Static_assert(LISTS < 25 || LISTS * RULES_OF_A_LIST >= 3 * CT_RULE_COUNT,
               "every rule has three lists or more");

/* All numbers are even and small: nothing is rounded in any dtype. */
static void
test_sums_of_other_dtypes_and_with_a_factor_are_added_to_the_last(void)
{
    static const size_t lengths[] = {0, 1, 511, 512, 513, 1024, 1300};
    static double sums[1301], values[1301];
    for (size_t k = 0; k < 4 * 4 * 7; k++) {
        const ct_dtype to = dtypes[k % 4], from = dtypes[k / 4 % 4];
        const size_t n = lengths[k / 16];
        const double factor = k % 3 == 0 ? 0.5 : 1.0;
        for (size_t i = 0; i <= n; i++) {
            ct_store(to, sums, i, 2.0 * (double)(i % 40));
            ct_store(from, values, i, 2.0 * (double)(i % 27) - 30.0);
        }
        const ct_span sum = {sums, n, to}, value = {values, n, from};
        CHECK(ct_device_cpu.add(NULL, &sum, &value, 1, factor, NULL) == CT_OK);
        for (size_t i = 0; i <= n; i++) { /* the last is not of the span */
            const double added = i < n ? factor * (2.0 * (double)(i % 27) - 30.0) : 0.0;
            CHECK(ct_load(to, sums, i) == 2.0 * (double)(i % 40) + added);
        }
    }
}

static void
test_an_empty_list_is_no_work(void)
{
    CHECK(ct_device_cpu.update(NULL, NULL, &(ct_update){.rule = CT_RULE_sgd}, NULL) ==
          CT_OK);
    CHECK(ct_device_cpu.average(NULL, NULL, NULL, 0, 0.5, NULL) == CT_OK);
    CHECK(ct_device_cpu.scale(NULL, 2.0, INFINITY, NULL, 0, NULL) == CT_OK);
    CHECK(ct_device_cpu.zero(NULL, NULL, 0, NULL) == CT_OK);
    CHECK(ct_device_cpu.copy(NULL, NULL, NULL, 0, NULL) == CT_OK);
}

static void
test_dtypes_that_are_no_floats_are_rejected_and_named(void)
{
    int64_t x[2] = {1, 2};
    ct_error err;
    ct_update_span span = {.n = 2, .grad = x, .param = x, .dtype = CT_I64};
    const ct_update update = {.rule = CT_RULE_adamw, .spans = &span, .n_spans = 1};
    const ct_span spans[2] = {
        {NULL, 0, CT_F32},
        {x,    2, CT_I64}
    };
    CHECK(ct_device_cpu.update(NULL, NULL, &update, &err) == CT_EINVAL);
    CHECK(strcmp(err.message, "adamw: span 0 has parameters of int64, and only float "
                              "dtypes work") == 0);
    span.dtype = CT_F32;
    CHECK(ct_device_cpu.update(NULL, NULL, &update, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "adamw: span 0 lacks state array 0 of 2") != NULL);
    CHECK(ct_device_cpu.scale(NULL, 2.0, INFINITY, spans, 2, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "scale: span 1 is int64") != NULL);
    CHECK(x[0] == 1 && x[1] == 2);
    CHECK(ct_device_cpu.zero(NULL, spans, 2, &err) == CT_OK);
    CHECK(x[0] == 0 && x[1] == 0);
}

int
main(void)
{
    test_random_lists_equal_plain_loops_over_the_formulas();
    test_scaling_stops_at_the_limit_and_keeps_nan();
    test_sums_of_other_dtypes_and_with_a_factor_are_added_to_the_last();
    test_an_empty_list_is_no_work();
    test_dtypes_that_are_no_floats_are_rejected_and_named();
    return 0;
}
