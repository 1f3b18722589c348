#include "core/ct_step.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

/* A single SGD parameter of two elements with lr 1: what is subtracted from it is the
 * gradient as the step scaled it. */
typedef struct fixture {
    ct_optim *optim;
    float grad[2], param[2];
} fixture;

static void
fixture_of(fixture *f, const ct_device *device, float first, float second)
{
    f->grad[0] = first;
    f->grad[1] = second;
    f->param[0] = f->param[1] = 0.0f;
    f->optim = ct_optim_new(device);
    CHECK(f->optim != NULL && ct_optim_resize(f->optim, 1, 1, NULL) == CT_OK);
    ct_optim_groups_borrow(f->optim)[0] =
        (ct_optim_group){.kind = CT_OPTIM_SGD, .sgd = {.lr = 1.0}};
    ct_optim_params_borrow(f->optim)[0] =
        (ct_optim_param){.param = f->param, .grad = f->grad, .n = 2, .dtype = CT_F32};
}

static void
fixture_init(fixture *f, float first, float second)
{
    fixture_of(f, &ct_device_cpu, first, second);
}

static ct_step_result
step(fixture *f, ct_step_config config, double loss_scale)
{
    ct_step_result result;
    CHECK(ct_step_measure(f->optim, NULL, &config, loss_scale, &result, NULL) == CT_OK);
    CHECK(!result.updated);
    CHECK(ct_step_apply(f->optim, NULL, &config, loss_scale, &result, NULL) == CT_OK);
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
    CHECK(ct_step_measure(f.optim, NULL, &config, 1.0, &r, &err) == CT_OK);
    CHECK(isinf(r.grad_norm) && !r.finite);
    CHECK(ct_step_apply(f.optim, NULL, &config, 1.0, &r, &err) == CT_EFLOAT);
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
        CHECK(ct_step_measure(f.optim, NULL, &config, 1.0, &r, &err) == CT_EINVAL);
        CHECK(strstr(err.message, "max_norm") != NULL);
    }
    for (size_t i = 0; i < 4; i++) {
        const ct_step_config config = {.clip.max_norm = 1.0};
        CHECK(ct_step_apply(f.optim, NULL, &config, bad_scales[i], &r, &err) ==
              CT_EINVAL);
        CHECK(strstr(err.message, "loss_scale") != NULL);
    }
    CHECK(f.param[0] == 0.0f);
    ct_optim_free(f.optim);
}

/* A device whose work goes to the stream of one test alone. */
static int the_stream, enqueued;

static void
note(const void *stream)
{
    CHECK(stream == &the_stream);
    enqueued++;
}

static ct_status
noted_norm(void *stream, ct_scratch *scratch, double p, const ct_span *spans, size_t n,
           double *sum, ct_error *err)
{
    note(stream);
    return ct_device_cpu.norm(NULL, scratch, p, spans, n, sum, err);
}

static ct_status
noted_read(void *stream, const double *value, double *host, ct_error *err)
{
    note(stream);
    return ct_device_cpu.read(NULL, value, host, err);
}

static ct_status
noted_update(void *stream, const ct_update *update, ct_error *err)
{
    note(stream);
    return ct_device_cpu.update(NULL, update, err);
}

static void
test_all_of_a_step_goes_to_the_stream_that_is_given(void)
{
    fixture f;
    ct_step_result r;
    ct_device device = ct_device_cpu;
    device.norm = noted_norm;
    device.read = noted_read;
    device.update = noted_update;
    const ct_step_config config = {.clip.max_norm = 1.0};
    fixture_of(&f, &device, 3.0f, 4.0f);
    CHECK(ct_step_measure(f.optim, &the_stream, &config, 1.0, &r, NULL) == CT_OK);
    CHECK(ct_step_apply(f.optim, &the_stream, &config, 1.0, &r, NULL) == CT_OK);
    CHECK(enqueued == 3 && r.grad_norm == 5.0 && r.updated);
    ct_optim_free(f.optim);
}

int
main(void)
{
    test_the_coefficient_is_that_of_torch();
    test_a_small_norm_is_not_clipped();
    test_a_large_norm_is_clipped_and_reported_as_it_was();
    test_the_loss_scale_is_taken_out_before_clipping();
    test_skip_leaves_the_weights_and_the_count_alone_but_drops_the_gradient();
    test_stop_fails_and_touches_nothing();
    test_keep_updates_all_the_same();
    test_without_gradients_the_norm_is_zero_and_nothing_moves();
    test_bad_settings_are_named();
    test_all_of_a_step_goes_to_the_stream_that_is_given();
    return 0;
}
