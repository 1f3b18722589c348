#include "core/engine/step.h"
#include "ct_streamed.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

/* Two groups of SGD with lr 1, the first with two parameters apart from each other in
 * the list: what is subtracted is the gradient as the step clipped it. */
typedef struct fixture {
    ct_optim *optim;
    double grad[3], param[3];
} fixture;

static fixture
fixture_make(void)
{
    fixture f = {
        .grad = {3.0, 5.0, 4.0},
        .optim = ct_optim_new(&ct_device_streamed),
    };
    CHECK(f.optim != NULL && ct_optim_resize(f.optim, 2, 3, NULL) == CT_OK);
    for (size_t g = 0; g < 2; g++) {
        ct_optim_groups_borrow(f.optim)[g] =
            (ct_optim_group){.kind = CT_OPTIM_SGD, .sgd = {.lr = 1.0}};
    }
    return f;
}

static ct_step_result
step(fixture *f, const ct_clip *clip, double loss_scale)
{
    const ct_step_config config = {.clip = *clip, .nonfinite = CT_NONFINITE_KEEP};
    ct_step_result result;
    for (size_t i = 0; i < 3; i++) {
        ct_optim_params_borrow(f->optim)[i] = (ct_optim_param){
            .param = &f->param[i],
            .grad = &f->grad[i],
            .n = 1,
            .dtype = CT_F64,
            .grad_dtype = CT_F64,
            .group = i == 1,
        };
    }
    CHECK(ct_step_measure(f->optim, &ct_the_stream, &config, loss_scale, &result,
                          NULL) == CT_OK);
    CHECK(ct_step_apply(f->optim, &ct_the_stream, &config, loss_scale, &result, NULL) ==
          CT_OK);
    return result;
}

static void
check_params(const fixture *f, double first, double second, double third)
{
    CHECK(f->param[0] == -first && f->param[1] == -second && f->param[2] == -third);
}

static void
test_the_norm_is_of_the_type_that_is_asked_for(void)
{
    static const double types[] = {0.0, 1.0, 2.0, INFINITY};
    const double norms[] = {sqrt(50.0), 12.0, sqrt(50.0), 5.0};
    for (size_t i = 0; i < 4; i++) {
        fixture f = fixture_make();
        const ct_clip clip = {.max_norm = 2.0, .norm_type = types[i]};
        const ct_step_result r = step(&f, &clip, 1.0);
        const double coef = ct_clip_coef(2.0, norms[i]);
        CHECK(r.grad_norm == norms[i] && r.clip_coef == coef);
        check_params(&f, 3.0 * coef, 5.0 * coef, 4.0 * coef);
        ct_optim_free(f.optim);
    }
    fixture f = fixture_make();
    const ct_step_result r = step(&f, &(ct_clip){.norm_type = 3.0}, 1.0);
    CHECK(fabs(r.grad_norm - cbrt(216.0)) < 1e-14 && r.clip_coef == 1.0);
    ct_optim_free(f.optim);
}

static void
test_groups_are_clipped_by_their_own_norm(void)
{
    fixture f = fixture_make();
    const double first = ct_clip_coef(1.0, 5.0), second = ct_clip_coef(1.0, 5.0);
    const ct_clip clip = {.max_norm = 1.0, .by_group = true};
    const ct_step_result r = step(&f, &clip, 1.0);
    CHECK(r.grad_norm == sqrt(50.0) && r.clip_coef == first);
    check_params(&f, 3.0 * first, 5.0 * second, 4.0 * first);
    ct_optim_free(f.optim);
}

static void
test_a_maximum_of_a_group_is_its_own_and_the_rest_is_clipped_together(void)
{
    fixture f = fixture_make();
    const double rest = ct_clip_coef(4.0, 5.0), own = ct_clip_coef(0.5, 5.0);
    const ct_clip clip = {.max_norm = 4.0};
    ct_optim_groups_borrow(f.optim)[1].max_norm = 0.5;
    const ct_step_result r = step(&f, &clip, 1.0);
    CHECK(r.grad_norm == sqrt(50.0) && r.clip_coef == own);
    check_params(&f, 3.0 * rest, 5.0 * own, 4.0 * rest);
    ct_optim_free(f.optim);
}

static void
test_a_group_of_infinite_maximum_is_left_alone(void)
{
    fixture f = fixture_make();
    const double coef = ct_clip_coef(1.0, 5.0);
    const ct_clip clip = {.max_norm = 1.0, .by_group = true};
    ct_optim_groups_borrow(f.optim)[1].max_norm = INFINITY;
    (void)step(&f, &clip, 1.0);
    check_params(&f, 3.0 * coef, 5.0, 4.0 * coef);
    ct_optim_free(f.optim);
}

static void
test_values_are_clipped_after_the_norm_and_without_the_loss_scale(void)
{
    fixture f = fixture_make();
    const ct_clip clip = {.value = 3.5};
    ct_step_result r = step(&f, &clip, 0.5);
    CHECK(r.grad_norm == 2.0 * sqrt(50.0) && r.clip_coef == 1.0);
    check_params(&f, 3.5, 3.5, 3.5);
    CHECK(f.grad[0] == 3.5); /* in place */
    ct_optim_free(f.optim);

    f = fixture_make();
    const double coef = ct_clip_coef(5.0, sqrt(50.0));
    const ct_clip both = {.max_norm = 5.0, .value = 2.5};
    r = step(&f, &both, 1.0);
    CHECK(r.clip_coef == coef && 3.0 * coef < 2.5);
    check_params(&f, 3.0 * coef, 2.5, 2.5);
    ct_optim_free(f.optim);
}

static void
test_what_was_measured_once_does_not_clip_the_next_update(void)
{
    fixture f = fixture_make();
    (void)step(&f, &(ct_clip){.max_norm = 1.0}, 1.0);
    memset(f.param, 0, sizeof f.param);
    const ct_step_config config = {.clip = {.value = 100.0}};
    ct_step_result result = {.finite = true, .clip_coef = 1.0};
    CHECK(ct_step_apply(f.optim, &ct_the_stream, &config, 1.0, &result, NULL) == CT_OK);
    check_params(&f, 3.0, 5.0, 4.0);
    ct_optim_free(f.optim);
}

static void
test_a_bad_gradient_is_found_in_any_group(void)
{
    static const double types[] = {1.0, 2.0, INFINITY, 3.0};
    for (size_t i = 0; i < 8; i++) {
        fixture f = fixture_make();
        const ct_clip clip = {
            .max_norm = 1.0, .norm_type = types[i / 2], .by_group = i % 2 == 0};
        f.grad[1] = NAN;
        const ct_step_result r = step(&f, &clip, 1.0);
        CHECK(!r.finite && isnan(r.grad_norm) && isnan(r.clip_coef));
        CHECK(isnan(f.param[1]) && isnan(f.param[0]) == (i % 2 != 0));
        ct_optim_free(f.optim);
    }
}

static void
test_bad_settings_are_named(void)
{
    static const struct {
        ct_clip clip;
        const char *name;
    } cases[] = {
        {{.max_norm = -1.0},  "max_norm"  },
        {{.norm_type = -2.0}, "norm_type" },
        {{.norm_type = NAN},  "norm_type" },
        {{.value = NAN},      "clip_value"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ct_error err;
        CHECK(ct_clip_check(&cases[i].clip, &err) == CT_EINVAL);
        CHECK(strstr(err.message, cases[i].name) != NULL);
    }
    CHECK(ct_clip_check(&(ct_clip){0}, NULL) == CT_OK);
}

int
main(void)
{
    test_the_norm_is_of_the_type_that_is_asked_for();
    test_groups_are_clipped_by_their_own_norm();
    test_a_maximum_of_a_group_is_its_own_and_the_rest_is_clipped_together();
    test_a_group_of_infinite_maximum_is_left_alone();
    test_values_are_clipped_after_the_norm_and_without_the_loss_scale();
    test_what_was_measured_once_does_not_clip_the_next_update();
    test_a_bad_gradient_is_found_in_any_group();
    test_bad_settings_are_named();
    return 0;
}
