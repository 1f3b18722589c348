#include "core/engine/step.h"
#include "ct_random.h"
#include "ct_streamed.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

enum {
    SPANS = 7,
    MOST = 40
};

/* A single SGD parameter of two elements with lr 1: what is subtracted from it is the
 * gradient as the step scaled it. */
typedef struct fixture {
    ct_optim *optim;
    float grad[2], param[2];
} fixture;

static void
fixture_init(fixture *f, float first, float second)
{
    f->grad[0] = first;
    f->grad[1] = second;
    f->param[0] = f->param[1] = 0.0f;
    f->optim = ct_optim_new(&ct_device_streamed);
    CHECK(f->optim != NULL && ct_optim_resize(f->optim, 1, 1, NULL) == CT_OK);
    ct_optim_groups_borrow(f->optim)[0] =
        (ct_optim_group){.kind = CT_OPTIM_SGD, .sgd = {.lr = 1.0}};
    ct_optim_params_borrow(f->optim)[0] =
        (ct_optim_param){.param = f->param, .grad = f->grad, .n = 2, .dtype = CT_F32};
}

static ct_step_result
step(fixture *f, ct_step_config config, double loss_scale)
{
    ct_step_result result;
    CHECK(ct_step_measure(f->optim, &ct_the_stream, &config, loss_scale, &result,
                          NULL) == CT_OK);
    CHECK(!result.updated);
    CHECK(ct_step_apply(f->optim, &ct_the_stream, &config, loss_scale, &result, NULL) ==
          CT_OK);
    return result;
}

static void
test_the_coefficient_is_that_of_torch(void)
{
    CHECK(ct_clip_coef(1.0, 4.0) == 1.0 / (4.0 + 1e-6));
    CHECK(ct_clip_coef(1.0, 0.5) == 1.0);
    CHECK(ct_clip_coef(0.0, 4.0) == 1.0);
    CHECK(ct_clip_coef(INFINITY, 4.0) == 1.0);
    CHECK(ct_clip_coef(1.0, INFINITY) == 0.0);
    CHECK(isnan(ct_clip_coef(1.0, NAN)));
}

static void
test_a_small_norm_is_not_clipped(void)
{
    fixture f;
    fixture_init(&f, 3.0f, 4.0f);
    const ct_step_result r = step(&f, (ct_step_config){.clip.max_norm = 6.0}, 1.0);
    CHECK(r.grad_norm == 5.0 && r.clip_coef == 1.0 && r.finite && r.updated);
    CHECK(f.param[0] == -3.0f && f.param[1] == -4.0f && f.grad[0] == 3.0f);
    ct_optim_free(f.optim);
}

static void
test_a_large_norm_is_clipped_and_reported_as_it_was(void)
{
    fixture f;
    fixture_init(&f, 3.0f, 4.0f);
    const ct_step_config config = {.clip.max_norm = 1.0, .zero_grads = true};
    const ct_step_result r = step(&f, config, 1.0);
    CHECK(r.grad_norm == 5.0 && r.clip_coef == 1.0 / (5.0 + 1e-6));
    CHECK(fabs(f.param[0] + 0.6) < 1e-6 && fabs(f.param[1] + 0.8) < 1e-6);
    CHECK(f.grad[0] == 0.0f && f.grad[1] == 0.0f);
    ct_optim_free(f.optim);
}

static void
test_the_loss_scale_is_taken_out_before_clipping(void)
{
    fixture f;
    fixture_init(&f, 3.0f * 1024.0f, 4.0f * 1024.0f);
    ct_step_result r = step(&f, (ct_step_config){.clip.max_norm = 5.5}, 1024.0);
    CHECK(r.grad_norm == 5.0 && r.clip_coef == 1.0 && f.param[0] == -3.0f);
    ct_optim_free(f.optim);
}

/* By value comes after by norm, and what was left in the gradients is what was used. */
static void
test_values_are_clipped_after_the_norm(void)
{
    ct_random r = {7};
    for (int draw = 0; draw < 100; draw++) {
        fixture f;
        const double scale = draw % 2 == 0 ? 1.0 : 256.0;
        const double values[2] = {8.0 * ct_random_unit(&r), 8.0 * ct_random_unit(&r)};
        const ct_clip clip = {.max_norm = draw % 3 == 0 ? 0.0 : 3.0, .value = 1.5};
        fixture_init(&f, (float)(scale * values[0]), (float)(scale * values[1]));
        const ct_step_result result = step(&f, (ct_step_config){.clip = clip}, scale);
        const double norm = hypot(values[0], values[1]);
        const double coef =
            clip.max_norm > 0.0 ? fmin(1.0, clip.max_norm / (norm + 1e-6)) : 1.0;
        CHECK(result.updated && fabs(result.clip_coef - coef) < 1e-6);
        for (size_t i = 0; i < 2; i++) {
            const double expected = fmax(-1.5, fmin(1.5, coef * values[i]));
            CHECK(fabs(f.grad[i] - expected) < 1e-5 && f.param[i] == -f.grad[i]);
        }
        ct_optim_free(f.optim);
    }
}

static void
test_skip_leaves_the_weights_and_the_count_alone_but_drops_the_gradient(void)
{
    fixture f;
    fixture_init(&f, NAN, 4.0f);
    const ct_step_config keeps_grads = {.nonfinite = CT_NONFINITE_SKIP};
    ct_step_result r = step(&f, keeps_grads, 1.0);
    CHECK(!r.finite && !r.updated && isnan(r.grad_norm));
    CHECK(f.param[0] == 0.0f && f.param[1] == 0.0f && f.grad[1] == 4.0f);
    CHECK(ct_optim_params_borrow(f.optim)[0].step == 0);

    const ct_step_config zeroes = {.nonfinite = CT_NONFINITE_SKIP, .zero_grads = true};
    r = step(&f, zeroes, 1.0);
    CHECK(!r.updated && f.grad[0] == 0.0f && f.grad[1] == 0.0f && f.param[1] == 0.0f);
    ct_optim_free(f.optim);
}

static void
test_stop_fails_and_touches_nothing(void)
{
    fixture f;
    ct_error err;
    ct_step_result r;
    fixture_init(&f, INFINITY, 4.0f);
    const ct_step_config config = {.nonfinite = CT_NONFINITE_STOP, .zero_grads = true};
    CHECK(ct_step_measure(f.optim, &ct_the_stream, &config, 1.0, &r, &err) == CT_OK);
    CHECK(isinf(r.grad_norm) && !r.finite);
    CHECK(ct_step_apply(f.optim, &ct_the_stream, &config, 1.0, &r, &err) == CT_EFLOAT);
    CHECK(strstr(err.message, "inf") != NULL && !r.updated);
    CHECK(f.param[1] == 0.0f && isinf(f.grad[0]) && f.grad[1] == 4.0f);
    ct_optim_free(f.optim);
}

static void
test_keep_updates_all_the_same(void)
{
    fixture f;
    fixture_init(&f, INFINITY, 4.0f);
    const ct_step_config config = {.nonfinite = CT_NONFINITE_KEEP};
    const ct_step_result r = step(&f, config, 1.0);
    CHECK(!r.finite && r.updated && isinf(f.param[0]) && f.param[1] == -4.0f);
    ct_optim_free(f.optim);
}

static void
test_without_gradients_the_norm_is_zero_and_nothing_moves(void)
{
    fixture f;
    fixture_init(&f, 1.0f, 1.0f);
    ct_optim_params_borrow(f.optim)[0].grad = NULL;
    const ct_step_result r = step(&f, (ct_step_config){.clip.max_norm = 1.0}, 1.0);
    CHECK(r.grad_norm == 0.0 && r.clip_coef == 1.0 && r.finite && r.updated);
    CHECK(f.param[0] == 0.0f);
    ct_optim_free(f.optim);
}

static void
test_bad_settings_are_named(void)
{
    fixture f;
    ct_error err;
    ct_step_result r = {.finite = true, .clip_coef = 1.0};
    fixture_init(&f, 1.0f, 1.0f);
    static const double bad_norms[] = {-1.0, NAN};
    static const double bad_scales[] = {0.0, -1.0, NAN, INFINITY};
    for (size_t i = 0; i < 2; i++) {
        const ct_step_config config = {.clip.max_norm = bad_norms[i]};
        CHECK(ct_step_measure(f.optim, &ct_the_stream, &config, 1.0, &r, &err) ==
              CT_EINVAL);
        CHECK(strstr(err.message, "max_norm") != NULL);
    }
    for (size_t i = 0; i < 4; i++) {
        const ct_step_config config = {.clip.max_norm = 1.0};
        CHECK(ct_step_apply(f.optim, &ct_the_stream, &config, bad_scales[i], &r,
                            &err) == CT_EINVAL);
        CHECK(strstr(err.message, "loss_scale") != NULL);
    }
    CHECK(f.param[0] == 0.0f);
    ct_optim_free(f.optim);
}

/* ---- without a wait -------------------------------------------------------------- */

static ct_step_result
enqueue(fixture *f, ct_step_config config, double loss_scale)
{
    ct_step_result result;
    CHECK(ct_step_can_enqueue(f->optim, &config));
    float next = 0.0f;
    const ct_step_scale scale = {loss_scale, &next, 2.0 * loss_scale, 0.5};
    CHECK(ct_step_enqueue(f->optim, &ct_the_stream, &config, &scale, NULL) == CT_OK);
    CHECK(ct_optim_params_borrow(f->optim)[0].step == 1); /* for all that is known */
    CHECK(ct_step_await(f->optim, &result, NULL) == CT_OK);
    CHECK(next == (result.finite ? (float)(2.0 * loss_scale) : 0.5f));
    return result;
}

static void
test_an_enqueued_step_unscales_clips_and_updates(void)
{
    fixture f;
    fixture_init(&f, 3.0f * 64.0f, 4.0f * 64.0f);
    const ct_step_result r = enqueue(&f, (ct_step_config){.clip.max_norm = 1.0}, 64.0);
    CHECK(r.grad_norm == 5.0 && r.clip_coef == 1.0 / (5.0 + 1e-6));
    CHECK(r.finite && r.updated && ct_optim_params_borrow(f.optim)[0].step == 1);
    CHECK(fabs(f.param[0] + 0.6) < 1e-6 && fabs(f.param[1] + 0.8) < 1e-6);
    ct_optim_free(f.optim);
}

static void
test_an_enqueued_step_that_is_skipped_is_not_counted(void)
{
    static const float bad[] = {NAN, INFINITY};
    for (size_t i = 0; i < 2; i++) {
        fixture f;
        fixture_init(&f, 2.0f, bad[i]);
        const ct_step_result r = enqueue(&f, (ct_step_config){0}, 1.0);
        CHECK(!r.finite && !r.updated && f.param[0] == 0.0f && f.param[1] == 0.0f);
        CHECK(ct_optim_params_borrow(f.optim)[0].step == 0);
        ct_optim_free(f.optim);
    }
}

static void
test_an_enqueued_step_that_keeps_infinities_counts(void)
{
    fixture f;
    fixture_init(&f, INFINITY, 4.0f);
    const ct_step_config config = {.nonfinite = CT_NONFINITE_KEEP};
    const ct_step_result r = enqueue(&f, config, 1.0);
    CHECK(!r.finite && r.updated && isinf(f.param[0]) && f.param[1] == -4.0f);
    CHECK(ct_optim_params_borrow(f.optim)[0].step == 1);
    ct_optim_free(f.optim);
}

/* ---- all kinds, enqueued and measured -------------------------------------------- */

enum {
    ROWS = 5,
    COLS = 3,
    ELEMS = ROWS * COLS
};

/* A matrix, in bfloat16 where its updates are rounded at random. */
typedef struct matrix {
    ct_optim *optim;
    double product;
    float grad[ELEMS], param[ELEMS], state[CT_OPTIM_MAX_STATES][ELEMS];
} matrix;

static void
matrix_init(matrix *m, const ct_optim_group *group)
{
    *m = (matrix){.product = 1.0, .optim = ct_optim_new(&ct_device_streamed)};
    CHECK(m->optim != NULL && ct_optim_resize(m->optim, 1, 1, NULL) == CT_OK);
    ct_optim_groups_borrow(m->optim)[0] = *group;
    ct_optim_param *p = ct_optim_params_borrow(m->optim);
    *p = (ct_optim_param){
        .param = m->param,
        .grad = m->grad,
        .product = &m->product,
        .product_dtype = CT_F64,
        .n = ELEMS,
        .ndim = 2,
        .rows = ROWS,
        .cols = COLS,
        .dtype = group->stochastic ? CT_BF16 : CT_F32,
        .state_dtype = CT_F32,
    };
    for (size_t k = 0; k < CT_OPTIM_MAX_STATES; k++) {
        p->state[k] = m->state[k];
    }
}

static void
matrix_grad(matrix *m, uint64_t step, bool bad)
{
    ct_random numbers = {31 + step};
    for (size_t i = 0; i < ELEMS; i++) {
        m->grad[i] = (float)(2.0 * ct_random_unit(&numbers));
    }
    m->grad[ELEMS / 2] = bad ? INFINITY : m->grad[ELEMS / 2];
}

static void
check_same_matrices(const matrix *a, const matrix *b)
{
    const ct_optim_param *p = ct_optim_params_borrow(a->optim);
    const ct_optim_group *group = ct_optim_groups_borrow(a->optim);
    const ct_optim_group *other = ct_optim_groups_borrow(b->optim);
    CHECK(p->step == ct_optim_params_borrow(b->optim)->step);
    CHECK(group->rounding.step == other->rounding.step);
    if (group->kind == CT_OPTIM_NAG) {
        CHECK(memcmp(&group->nag, &other->nag, sizeof group->nag) == 0);
    }
    if (group->kind == CT_OPTIM_SCHEDULE_FREE_ADAMW ||
        group->kind == CT_OPTIM_SCHEDULE_FREE_RADAM) {
        const ct_schedule_free_config *c = &group->schedule_free,
                                      *d = &other->schedule_free;
        CHECK(c->k == d->k && c->weight_sum == d->weight_sum);
        CHECK(c->lr_max == d->lr_max && c->scheduled_lr == d->scheduled_lr);
    }
    CHECK(a->product == b->product);
    CHECK(memcmp(a->param, b->param, sizeof a->param) == 0);
    CHECK(memcmp(a->state, b->state, sizeof a->state) == 0);
}

static void
test_an_enqueued_step_of_any_kind_is_the_measured_one(void)
{
    static const ct_schedule_free_config free = {.lr = 0.1,
                                                 .beta1 = 0.9,
                                                 .beta2 = 0.99,
                                                 .eps = 1e-8,
                                                 .weight_decay = 0.01,
                                                 .r = 1.0,
                                                 .weight_lr_power = 2.0,
                                                 .warmup_steps = 3.0,
                                                 .train_mode = true};
    static const ct_muon_config muon = {
        .lr = 0.1,
        .momentum = 0.9,
        .coefficients = {3.4, -4.7, 2.0},
        .eps = 1e-7,
        .steps = 3,
        .nesterov = true
    };
    static const ct_optim_group groups[] = {
        {.kind = CT_OPTIM_ADAMW, .adamw = {0.1, 0.9, 0.99, 1e-8, 0.01, true, true}},
        {.kind = CT_OPTIM_SGD, .sgd = {.lr = 0.1, .momentum = 0.9}, .stochastic = true},
        {.kind = CT_OPTIM_NADAM, .nadam = {0.1, 0.9, 0.99, 1e-8, 0.01, 4e-3, true}},
        {.kind = CT_OPTIM_NAG, .nag = {0.1, NAN, 0.9, 0.01}},
        {.kind = CT_OPTIM_SCHEDULE_FREE_ADAMW, .schedule_free = free},
        {.kind = CT_OPTIM_SCHEDULE_FREE_RADAM, .schedule_free = free},
        {.kind = CT_OPTIM_ADAFACTOR,
         .adafactor = {0.1, 1e-30, 1e-3, 1.0, -0.8, 0.9, 0.01, true, true, false}},
        {.kind = CT_OPTIM_ADAFACTOR,
         .adafactor = {0.1, 1e-30, 1e-3, 1.0, -0.8, NAN, 0.01, true, true, false}},
        {.kind = CT_OPTIM_LAMB,
         .lamb = {0.1, 0.9, 0.99, 1e-6, 0.01, 0.0, true, true, true, false}},
        {.kind = CT_OPTIM_LARS, .lars = {0.1, 0.9, 0.0, 0.1, 0.02, 1e-8, true, false}},
        {.kind = CT_OPTIM_MUON, .muon = muon},
    };
    const ct_step_config config = {.clip.max_norm = 0.25};
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        matrix a, b;
        matrix_init(&a, &groups[i]);
        matrix_init(&b, &groups[i]);
        for (uint64_t step = 0; step < 8; step++) {
            const bool bad = step == 0 || step == 3 || step == 4;
            const ct_step_scale scale = {.now = 8.0};
            ct_step_result found, expected;
            matrix_grad(&a, step, bad);
            matrix_grad(&b, step, bad);
            CHECK(ct_step_can_enqueue(a.optim, &config));
            CHECK(ct_step_enqueue(a.optim, &ct_the_stream, &config, &scale, NULL) ==
                  CT_OK);
            CHECK(ct_step_await(a.optim, &found, NULL) == CT_OK);
            CHECK(ct_step_measure(b.optim, &ct_the_stream, &config, 8.0, &expected,
                                  NULL) == CT_OK);
            CHECK(ct_step_apply(b.optim, &ct_the_stream, &config, 8.0, &expected,
                                NULL) == CT_OK);
            CHECK(found.updated == !bad && expected.updated == !bad);
            CHECK(bad ||
                  (found.clip_coef < 1.0 && found.clip_coef == expected.clip_coef));
            check_same_matrices(&a, &b);
        }
        CHECK(ct_optim_params_borrow(a.optim)->step == 5);
        ct_optim_free(a.optim);
        ct_optim_free(b.optim);
    }
}

/* Groups with limits of their own. */
static void
test_a_step_is_measured_first_where_the_host_has_to_decide(void)
{
    static const ct_step_config configs[] = {
        {.nonfinite = CT_NONFINITE_STOP},
        {.zero_grads = true},
        {.clip.value = 1.0},
        {.clip.by_group = true},
        {.clip.norm_type = 3.0},
        {.clip.norm_type = 0.5},
    };
    static const ct_optim_group groups[] = {
        {.kind = CT_OPTIM_SGD,  .max_norm = 1.0               },
        {.kind = CT_OPTIM_LAMB, .lamb = {.max_grad_norm = 1.0}},
    };
    fixture f;
    fixture_init(&f, 1.0f, 1.0f);
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        CHECK(!ct_step_can_enqueue(f.optim, &configs[i]));
    }
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        ct_optim_groups_borrow(f.optim)[0] = groups[i];
        CHECK(!ct_step_can_enqueue(f.optim, &(ct_step_config){0}));
    }
    ct_optim_free(f.optim);
}

/* ---- sums of gradients ----------------------------------------------------------- */

/* All powers are positive: adding up to 280 of them in any order keeps 13 digits. */
static bool
near(double got, double expected)
{
    return fabs(got - expected) <= 1e-13 * expected;
}

static void
add_up(double *sum, double p, double value)
{
    *sum = isinf(p) ? fmax(*sum, fabs(value)) : *sum + pow(fabs(value), p);
}

static void
test_sums_are_those_of_each_gradient_of_each_group_and_of_all(void)
{
    static const double powers[] = {0.5, 1.0, 2.0, 3.0, INFINITY};
    static const uint32_t groups[SPANS] = {0, 0, 1, 0, 2, 2, 1};
    static float values[SPANS][MOST];
    ct_random r = {3};
    for (size_t k = 0; k < sizeof powers / sizeof powers[0]; k++) {
        double of_group[4] = {0};
        const double p = powers[k];
        ct_grads grads;
        ct_grads_init(&grads, &ct_device_streamed);
        CHECK(ct_grads_reserve(&grads, SPANS, NULL) == CT_OK);
        CHECK(ct_grads_set_groups(&grads, 3, NULL) == CT_OK);
        for (size_t i = 0; i < SPANS; i++) {
            const size_t n = ct_random_below(&r, MOST + 1);
            for (size_t at = 0; at < n; at++) {
                values[i][at] = (float)ct_random_unit(&r);
                add_up(&of_group[groups[i]], p, values[i][at]);
                add_up(&of_group[3], p, values[i][at]);
            }
            ct_grads_add(&grads, &(ct_span){values[i], n, CT_F32}, groups[i]);
        }
        CHECK(ct_grads_sum(&grads, &ct_the_stream, p, true, NULL) == CT_OK);
        for (size_t g = 0; g < 4; g++) { /* behind the groups', that of all */
            CHECK(near(grads.sums[g], of_group[g]));
        }
        *ct_grads_total(&grads) = 0.0;
        CHECK(ct_grads_sum(&grads, &ct_the_stream, p, false, NULL) == CT_OK);
        CHECK(near(*ct_grads_total(&grads), of_group[3]));
        ct_grads_fini(&grads);
    }
}

static void
test_a_spike_is_far_above_the_norms_before(void)
{
    double norms[CT_SPIKE_WINDOW];
    for (size_t i = 0; i < CT_SPIKE_WINDOW; i++) {
        norms[i] = i % 2 == 0 ? 1.0 : 3.0; /* mean 2, variance n / (n - 1) */
    }
    for (size_t n = CT_SPIKE_LEAST; n <= CT_SPIKE_WINDOW; n += 2) {
        const double limit = 2.0 + 6.0 * sqrt((double)n / (double)(n - 1));
        CHECK(!ct_step_is_spike(norms, n, limit - 1e-9, 6.0));
        CHECK(ct_step_is_spike(norms, n, limit + 1e-9, 6.0));
        CHECK(!ct_step_is_spike(norms, n, 0.0, 6.0)); /* far below is none */
        CHECK(!ct_step_is_spike(norms, n, NAN, 6.0));
    }
    CHECK(!ct_step_is_spike(norms, CT_SPIKE_LEAST - 1, 1e9, 6.0));
    CHECK(!ct_step_is_spike(NULL, 0, 1e9, 6.0));
    for (size_t i = 0; i < CT_SPIKE_WINDOW; i++) {
        norms[i] = 0.1;
    }
    CHECK(!ct_step_is_spike(norms, CT_SPIKE_WINDOW, 0.1, 1.0));
    CHECK(ct_step_is_spike(norms, CT_SPIKE_WINDOW, 0.2, 1.0));
}

static void
test_a_spike_is_skipped_whatever_the_policy(void)
{
    static const ct_nonfinite policies[] = {CT_NONFINITE_SKIP, CT_NONFINITE_STOP,
                                            CT_NONFINITE_KEEP};
    for (size_t i = 0; i < 3; i++) {
        fixture f;
        const ct_step_config config = {.nonfinite = policies[i]};
        ct_step_result result;
        fixture_init(&f, 3.0f, 4.0f);
        CHECK(ct_step_measure(f.optim, &ct_the_stream, &config, 1.0, &result, NULL) ==
              CT_OK);
        CHECK(!result.spike);
        result.spike = true;
        CHECK(ct_step_apply(f.optim, &ct_the_stream, &config, 1.0, &result, NULL) ==
              CT_OK);
        CHECK(!result.updated && f.param[0] == 0.0f && f.param[1] == 0.0f);
        ct_optim_free(f.optim);
    }
}

int
main(void)
{
    test_the_coefficient_is_that_of_torch();
    test_a_small_norm_is_not_clipped();
    test_a_large_norm_is_clipped_and_reported_as_it_was();
    test_the_loss_scale_is_taken_out_before_clipping();
    test_values_are_clipped_after_the_norm();
    test_skip_leaves_the_weights_and_the_count_alone_but_drops_the_gradient();
    test_stop_fails_and_touches_nothing();
    test_keep_updates_all_the_same();
    test_without_gradients_the_norm_is_zero_and_nothing_moves();
    test_bad_settings_are_named();
    test_an_enqueued_step_unscales_clips_and_updates();
    test_an_enqueued_step_that_is_skipped_is_not_counted();
    test_an_enqueued_step_that_keeps_infinities_counts();
    test_an_enqueued_step_of_any_kind_is_the_measured_one();
    test_a_step_is_measured_first_where_the_host_has_to_decide();
    test_sums_are_those_of_each_gradient_of_each_group_and_of_all();
    test_a_spike_is_far_above_the_norms_before();
    test_a_spike_is_skipped_whatever_the_policy();
    return 0;
}
