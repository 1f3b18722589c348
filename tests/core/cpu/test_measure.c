/* The first two parts of measured rules, and factored second moments, against plain
 * loops.
 */
#include "core/base/alloc.h"
#include "ct_kernels.h"
#include "ct_random.h"
#include "ct_rule_examples.h"

#include <math.h>
#include <string.h>

enum {
    MOST_SPANS = 12,
    GRAD = 0,
    PARAM,
    STATE,
    ROLES = STATE + CT_RULE_MAX_STATES
};

typedef struct problem {
    ct_update_span spans[MOST_SPANS];
    size_t n_spans;
    char *start[MOST_SPANS][ROLES], *memory[MOST_SPANS][ROLES];
    double expected_state[MOST_SPANS];
    ct_rule rule;
    ct_rule_coef coefs[CT_RULE_VARIANTS];
    ct_rule_coef settled[MOST_SPANS];
} problem;

static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_F16};

static problem
problem_make(ct_random *r)
{
    problem p = {.n_spans = MOST_SPANS};
    for (size_t i = 0; i < p.n_spans; i++) {
        const ct_dtype state = dtypes[ct_random_below(r, 4)];
        const size_t n = ct_random_below(r, i == 5 ? 200000 : 700);
        ct_dtype dtype[ROLES];
        for (int k = 0; k < ROLES; k++) {
            dtype[k] = k >= STATE ? state : dtypes[ct_random_below(r, 4)];
            p.start[i][k] = ct_calloc(n + 1, 8);
            p.memory[i][k] = ct_calloc(n + 1, 8);
            for (size_t e = 0; e < n; e++) {
                const double x = ct_random_unit(r);
                ct_store(dtype[k], p.start[i][k], e, k >= STATE ? x * x + 0.01 : x);
            }
        }
        p.spans[i] = (ct_update_span){
            .n = n,
            .grad = p.memory[i][GRAD],
            .param = p.memory[i][PARAM],
            .dtype = dtype[PARAM],
            .grad_dtype = dtype[GRAD],
            .state_dtype = state,
            .coef = (uint32_t)ct_random_below(r, CT_RULE_VARIANTS),
        };
        for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
            p.spans[i].state[k] = p.memory[i][STATE + k];
        }
    }
    return p;
}

static void
problem_free(problem *p)
{
    for (size_t i = 0; i < p->n_spans; i++) {
        for (int k = 0; k < ROLES; k++) {
            ct_free(p->start[i][k]);
            ct_free(p->memory[i][k]);
        }
    }
}

static void
measure(problem *p, ct_rule_coef *settled)
{
    ct_scratch scratch = {0};
    for (size_t i = 0; i < p->n_spans; i++) {
        for (int k = 0; k < ROLES; k++) {
            memcpy(p->memory[i][k], p->start[i][k], 8 * p->spans[i].n);
        }
    }
    const ct_update update = {
        .rule = p->rule, .coefs = p->coefs, .spans = p->spans, .n_spans = p->n_spans};
    double sums[CT_MEASURES * MOST_SPANS];
    CHECK(ct_device_cpu.measure(NULL, &scratch, &update, sums, NULL) == CT_OK);
    CHECK(ct_device_cpu.settle(NULL, &update, sums, settled, NULL) == CT_OK);
    ct_device_cpu.scratch_release(&scratch);
}

/* What a rule makes of one element: its state, and two terms. */
static void
measure_element(const problem *p, const ct_update_span *span, double grad, double param,
                double *state, double *terms)
{
    const ct_rule_coef *c = &p->coefs[span->coef];
    float state32[CT_RULE_MAX_STATES], terms32[CT_MEASURES];
    for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
        state32[k] = (float)state[k];
    }
    switch (p->rule) {
#define CT_MEASURED(rule, constants, n_states)                                         \
    case CT_RULE_##rule: {                                                             \
        const ct_##constants##_coef_f64 c64 = ct_##constants##_round_f64(&c->rule);    \
        const ct_##constants##_coef_f32 c32 = ct_##constants##_round_f32(&c->rule);    \
        if (span->dtype == CT_F64) {                                                   \
            ct_##rule##_measure_f64(&c64, grad, param, state, terms);                  \
            return;                                                                    \
        }                                                                              \
        ct_##rule##_measure_f32(&c32, (float)grad, (float)param, state32, terms32);    \
        break;                                                                         \
    }
#include "math/measured.def"
#undef CT_MEASURED
    default:
        CHECK(false);
    }
    for (int k = 0; k < CT_RULE_MAX_STATES; k++) {
        state[k] = (double)state32[k];
    }
    for (int m = 0; m < CT_MEASURES; m++) {
        terms[m] = (double)terms32[m];
    }
}

/* Sums of n squares in double are right to n * 2^-53 of them, and what is settled
 * takes a square root, which halves that, and few operations more. */
static void
check_settled(const problem *p, size_t i, const double *sums)
{
    const ct_update_span *span = &p->spans[i];
    ct_rule_coef expected = p->coefs[span->coef];
    const double bound = ((double)span->n + 16.0) * 0x1p-53;
    ct_rule_settle(p->rule, &expected, sums, span->n);
    const double pairs[][2] = {
        {p->settled[i].lamb.step_size,   expected.lamb.step_size  },
        {p->settled[i].lars.ratio,       expected.lars.ratio      },
        {p->settled[i].lars.decay,       expected.lars.decay      },
        {p->settled[i].adafactor.rms,    expected.adafactor.rms   },
        {p->settled[i].adafactor.factor, expected.adafactor.factor},
        {p->settled[i].adafactor.decay,  expected.adafactor.decay },
        {p->settled[i].muon.inv_norm,    expected.muon.inv_norm   },
    };
    const size_t first = p->rule == CT_RULE_lamb ? 0
                         : p->rule == CT_RULE_lars || p->rule == CT_RULE_lars_momentum
                             ? 1
                         : p->rule == CT_RULE_muon_normalize ? 6
                                                             : 3;
    const size_t counts[] = {1, 2, 0, 3, 0, 0, 1};
    for (size_t k = first; k < first + counts[first]; k++) {
        CHECK(fabs(pairs[k][0] - pairs[k][1]) <= bound * fabs(pairs[k][1]));
    }
}

static void
check_span(problem *p, size_t i)
{
    const ct_update_span *span = &p->spans[i];
    double sums[CT_MEASURES] = {0.0};
    const bool wide = span->dtype == CT_F64;
    for (size_t e = 0; e < span->n; e++) {
        double x[ROLES], terms[CT_MEASURES];
        for (int k = 0; k < ROLES; k++) {
            const ct_dtype dtype = k == GRAD    ? span->grad_dtype
                                   : k == PARAM ? span->dtype
                                                : span->state_dtype;
            x[k] = ct_load(dtype, p->start[i][k], e);
            x[k] = wide ? x[k] : (double)(float)x[k];
        }
        measure_element(p, span, x[GRAD], x[PARAM], &x[STATE], terms);
        for (size_t k = 0; k < ct_rule_n_states(p->rule); k++) {
            char element[8];
            const size_t size = ct_dtype_size(span->state_dtype);
            ct_store(span->state_dtype, element, 0, x[STATE + k]);
            CHECK(memcmp(element, p->memory[i][STATE + k] + e * size, size) == 0);
        }
        for (int m = 0; m < CT_MEASURES; m++) {
            sums[m] += terms[m] * terms[m];
        }
    }
    CHECK(memcmp(p->start[i][PARAM], p->memory[i][PARAM], 8 * span->n) == 0);
    CHECK(memcmp(p->start[i][GRAD], p->memory[i][GRAD], 8 * span->n) == 0);
    if (span->n != 0) {
        check_settled(p, i, sums);
    }
}

static void
check_same_bits(void *arg)
{
    problem *p = arg;
    ct_rule_coef settled[MOST_SPANS];
    measure(p, settled);
    for (size_t i = 0; i < p->n_spans; i++) {
        if (p->spans[i].n != 0) {
            CHECK(memcmp(&settled[i], &p->settled[i], sizeof settled[i]) == 0);
        }
    }
}

static void
test_every_measured_rule_equals_plain_loops_and_settles_alike_always(void)
{
    ct_random r = {41};
    for (int rule = 0; rule < CT_RULE_COUNT; rule++) {
        if (!ct_rule_is_measured((ct_rule)rule)) {
            continue;
        }
        problem p = problem_make(&r);
        p.rule = (ct_rule)rule;
        for (size_t c = 0; c < CT_RULE_VARIANTS; c++) {
            p.coefs[c] = ct_rule_example(p.rule, c);
        }
        measure(&p, p.settled);
        for (size_t i = 0; i < p.n_spans; i++) {
            check_span(&p, i);
        }
        ct_for_each_setting(check_same_bits, &p);
        problem_free(&p);
    }
}

static void
test_a_rule_that_measures_nothing_is_rejected(void)
{
    ct_error err;
    ct_scratch scratch = {0};
    const ct_update update = {.rule = CT_RULE_sgd};
    CHECK(ct_device_cpu.measure(NULL, &scratch, &update, NULL, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "sgd: there is nothing to measure") != NULL);
    CHECK(ct_device_cpu.settle(NULL, &update, NULL, NULL, &err) == CT_EINVAL);
}

/* A state that is row[b][i] * col[b][j] gives what the same state in memory gives. */
static void
test_an_outer_product_stands_for_the_first_state(void)
{
    enum {
        MATRICES = 3,
        ROWS = 5,
        COLS = 130,
        N = MATRICES * ROWS * COLS
    };
    static float grad[N], stored[N], a[N], b[N];
    float row[MATRICES * ROWS], col[MATRICES * COLS];
    ct_random r = {8};
    const ct_rule_coef coef = ct_rule_example(CT_RULE_adafactor, 2);
    for (size_t i = 0; i < MATRICES * ROWS; i++) {
        row[i] = (float)ct_random_unit(&r);
    }
    for (size_t i = 0; i < MATRICES * COLS; i++) {
        col[i] = (float)ct_random_unit(&r);
    }
    for (size_t i = 0; i < N; i++) {
        const size_t matrix = i / (ROWS * COLS);
        grad[i] = (float)ct_random_unit(&r);
        a[i] = b[i] = (float)ct_random_unit(&r);
        stored[i] = row[i / COLS] * col[matrix * COLS + i % COLS];
    }
    ct_update_span span = {.n = N,
                           .grad = grad,
                           .param = a,
                           .state = {stored},
                           .rows = ROWS,
                           .cols = COLS};
    const ct_update update = {
        .rule = CT_RULE_adafactor, .coefs = &coef, .spans = &span, .n_spans = 1};
    CHECK(ct_device_cpu.update(NULL, NULL, &update, NULL) == CT_OK);
    span.param = b;
    span.state[0] = NULL;
    span.row = row;
    span.col = col;
    CHECK(ct_device_cpu.update(NULL, NULL, &update, NULL) == CT_OK);
    CHECK(memcmp(a, b, sizeof a) == 0);
    span.n = 301; /* of a part, that of its place */
    span.begin = 140;
    span.whole = N;
    span.grad = grad + 140;
    span.param = b + 140;
    CHECK(ct_device_cpu.update(NULL, NULL, &update, NULL) == CT_OK);
    span.param = a + 140;
    span.row = span.col = NULL;
    span.state[0] = stored + 140;
    CHECK(ct_device_cpu.update(NULL, NULL, &update, NULL) == CT_OK);
    CHECK(memcmp(a, b, sizeof a) == 0);
}

int
main(void)
{
    test_every_measured_rule_equals_plain_loops_and_settles_alike_always();
    test_a_rule_that_measures_nothing_is_rejected();
    test_an_outer_product_stands_for_the_first_state();
    return 0;
}
