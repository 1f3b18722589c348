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

/* Groups whose rule has more to take back than a count, or measures by itself. */
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
        {.kind = CT_OPTIM_SGD, .max_norm = 1.0},
        {.kind = CT_OPTIM_SGD, .stochastic = true},
        {.kind = CT_OPTIM_NADAM},
        {.kind = CT_OPTIM_NAG},
        {.kind = CT_OPTIM_LAMB},
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
    test_a_step_is_measured_first_where_the_host_has_to_decide();
    test_sums_are_those_of_each_gradient_of_each_group_and_of_all();
    test_a_spike_is_far_above_the_norms_before();
    test_a_spike_is_skipped_whatever_the_policy();
    return 0;
}
