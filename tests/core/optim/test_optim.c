#include "core/base/alloc.h"
#include "core/optim/optim.h"
#include "core/base/pool.h"
#include "ct_streamed.h"
#include "ct_test.h"
#include "math/half.h"

#include <math.h>
#include <string.h>

enum {
    N = 5
};

/* One parameter's memory. */
typedef struct tensor {
    float grad[N], param[N], m[N], v[N];
} tensor;

static tensor
tensor_make(float grad)
{
    tensor t;
    memset(&t, 0, sizeof t);
    for (size_t i = 0; i < N; i++) {
        t.grad[i] = grad;
        t.param[i] = 1.0f;
    }
    return t;
}

static void
attach(ct_optim *optim, size_t i, uint32_t group, tensor *t)
{
    ct_optim_params_borrow(optim)[i] = (ct_optim_param){
        .param = t->param,
        .grad = t->grad,
        .state = {t->m, t->v},
        .n = N,
        .dtype = CT_F32,
        .group = group,
    };
}

static ct_status
update(ct_optim *optim, double grad_scale, bool zero_grads, ct_error *err)
{
    const ct_optim_pass pass = {.grad_scale = grad_scale, .zero_grads = zero_grads};
    return ct_optim_update(optim, &ct_the_stream, &pass, err);
}

static const ct_adamw_config adamw = {
    .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.0};

static ct_optim *
adamw_make(size_t n_groups, size_t n_params)
{
    ct_optim *optim = ct_optim_new(&ct_device_streamed);
    CHECK(optim != NULL);
    CHECK(ct_optim_resize(optim, n_groups, n_params, NULL) == CT_OK);
    for (size_t g = 0; g < n_groups; g++) {
        ct_optim_groups_borrow(optim)[g].adamw = adamw;
    }
    return optim;
}

/* The L2 norm of all gradients present. */
static ct_status
norm_of(ct_optim *optim, double *norm, ct_error *err)
{
    ct_grads *grads;
    ct_status status = ct_optim_grads(optim, &grads, err);
    if (status == CT_OK) {
        status = ct_grads_sum(grads, &ct_the_stream, 2.0, false, err);
    }
    if (status == CT_OK) {
        *norm = sqrt(*ct_grads_total(grads));
    }
    return status;
}

static void
test_a_parameter_without_gradient_and_its_count_are_left_alone(void)
{
    tensor a = tensor_make(1.0f), b = tensor_make(1.0f);
    ct_optim *optim = adamw_make(1, 2);
    attach(optim, 0, 0, &a);
    attach(optim, 1, 0, &b);
    ct_optim_param *params = ct_optim_params_borrow(optim);
    params[1].grad = NULL;
    CHECK(update(optim, 1.0, false, NULL) == CT_OK);
    CHECK(params[0].step == 1 && fabsf(a.param[0] - 0.9f) < 1e-6f);
    CHECK(params[1].step == 0 && b.param[0] == 1.0f);
    ct_optim_free(optim);
}

/* A parameter that joins later is at its own first step, whatever the others are at:
 * bias correction makes the first update lr in size. */
static void
test_parameters_of_a_group_may_be_at_different_steps(void)
{
    tensor t[3] = {tensor_make(1.0f), tensor_make(1.0f), tensor_make(1.0f)};
    ct_optim *optim = adamw_make(1, 3);
    for (size_t i = 0; i < 3; i++) {
        attach(optim, i, 0, &t[i]);
    }
    ct_optim_param *params = ct_optim_params_borrow(optim);
    params[1].grad = NULL;
    CHECK(update(optim, 1.0, false, NULL) == CT_OK);
    params[1].grad = t[1].grad;
    CHECK(update(optim, 1.0, false, NULL) == CT_OK);
    CHECK(params[0].step == 2 && params[1].step == 1 && params[2].step == 2);
    CHECK(fabsf(t[1].param[0] - 0.9f) < 1e-6f);
    CHECK(fabsf(t[0].param[0] - 0.8f) < 1e-6f);
    CHECK(memcmp(t[0].param, t[2].param, sizeof t[0].param) == 0);
    ct_optim_free(optim);
}

static void
test_groups_have_their_own_hyperparameters_and_direction(void)
{
    tensor t[3] = {tensor_make(1.0f), tensor_make(1.0f), tensor_make(1.0f)};
    ct_optim *optim = adamw_make(2, 3);
    ct_optim_group *groups = ct_optim_groups_borrow(optim);
    groups[1].adamw.lr = 0.2;
    groups[1].maximize = true;
    attach(optim, 0, 0, &t[0]);
    attach(optim, 1, 1, &t[1]);
    attach(optim, 2, 0, &t[2]);
    CHECK(update(optim, 1.0, true, NULL) == CT_OK);
    CHECK(fabsf(t[0].param[0] - 0.9f) < 1e-6f && t[2].param[0] == t[0].param[0]);
    CHECK(fabsf(t[1].param[0] - 1.2f) < 1e-6f);
    CHECK(t[0].grad[N - 1] == 0.0f && t[1].grad[0] == 0.0f);
    ct_optim_free(optim);
}

static void
test_the_norm_is_that_of_the_gradients_present(void)
{
    tensor a = tensor_make(3.0f), b = tensor_make(4.0f), c = tensor_make(100.0f);
    ct_optim *optim = adamw_make(1, 3);
    double norm = -1.0;
    attach(optim, 0, 0, &a);
    attach(optim, 1, 0, &b);
    attach(optim, 2, 0, &c);
    ct_optim_params_borrow(optim)[2].grad = NULL;
    CHECK(norm_of(optim, &norm, NULL) == CT_OK);
    CHECK(norm == sqrt(N * 25.0));
    CHECK(ct_optim_zero_grads(optim, &ct_the_stream, NULL) == CT_OK);
    CHECK(a.grad[0] == 0.0f && b.grad[N - 1] == 0.0f && c.grad[0] == 100.0f);
    ct_optim_free(optim);
}

static void
test_sgd_without_momentum_needs_no_state(void)
{
    tensor t = tensor_make(1.0f);
    ct_optim *optim = ct_optim_new(&ct_device_streamed);
    CHECK(ct_optim_resize(optim, 1, 1, NULL) == CT_OK);
    ct_optim_groups_borrow(optim)[0] =
        (ct_optim_group){.kind = CT_OPTIM_SGD, .sgd = {.lr = 0.5}};
    CHECK(ct_optim_arrays(ct_optim_groups_borrow(optim), NULL) == 0);
    attach(optim, 0, 0, &t);
    ct_optim_params_borrow(optim)[0].state[0] = NULL;
    CHECK(update(optim, 0.5, false, NULL) == CT_OK);
    CHECK(t.param[0] == 0.75f);
    ct_optim_free(optim);
}

static void
test_sgd_starts_its_momentum_as_the_gradient_undampened(void)
{
    tensor t = tensor_make(1.0f);
    ct_optim *optim = ct_optim_new(&ct_device_streamed);
    CHECK(ct_optim_resize(optim, 1, 1, NULL) == CT_OK);
    ct_optim_groups_borrow(optim)[0] = (ct_optim_group){
        .kind = CT_OPTIM_SGD, .sgd = {.lr = 0.5, .momentum = 0.5, .dampening = 0.5}
    };
    CHECK(ct_optim_arrays(ct_optim_groups_borrow(optim), NULL) == 1);
    attach(optim, 0, 0, &t);
    CHECK(update(optim, 1.0, false, NULL) == CT_OK);
    CHECK(t.m[0] == 1.0f && t.param[0] == 0.5f);
    t.grad[0] = 3.0f;
    CHECK(update(optim, 1.0, false, NULL) == CT_OK);
    CHECK(t.m[0] == 2.0f && t.param[0] == -0.5f);
    ct_optim_free(optim);
}

/* What is wrong with the second of two parameters must leave the first alone. */
static void
check_rejected(void (*spoil)(ct_optim *optim), const char *word)
{
    tensor a = tensor_make(1.0f), b = tensor_make(1.0f);
    ct_optim *optim = adamw_make(2, 2);
    attach(optim, 0, 0, &a);
    attach(optim, 1, 1, &b);
    spoil(optim);
    const tensor before = a;
    ct_error err;
    CHECK(update(optim, 1.0, true, &err) == CT_EINVAL);
    CHECK(strstr(err.message, word) != NULL);
    CHECK(memcmp(&a, &before, sizeof a) == 0);
    CHECK(ct_optim_params_borrow(optim)[0].step == 0);
    ct_optim_free(optim);
}

static void
spoil_state(ct_optim *optim)
{
    ct_optim_params_borrow(optim)[1].state[1] = NULL;
}

static void
spoil_group(ct_optim *optim)
{
    ct_optim_params_borrow(optim)[1].group = 2;
}

static void
spoil_dtype(ct_optim *optim)
{
    ct_optim_params_borrow(optim)[1].dtype = CT_I64;
}

static void
spoil_memory(ct_optim *optim)
{
    ct_optim_params_borrow(optim)[1].param = NULL;
}

static void
spoil_lr(ct_optim *optim)
{
    ct_optim_groups_borrow(optim)[1].adamw.lr = NAN;
}

static void
test_a_rejected_update_changes_nothing(void)
{
    check_rejected(spoil_state, "parameter 1: its state array 1 is missing");
    check_rejected(spoil_group, "parameter 1: group must be below 2, got 2");
    check_rejected(spoil_dtype, "parameter 1: dtype must be a float, got int64");
    check_rejected(spoil_memory, "parameter 1 has a gradient but no memory");
    check_rejected(spoil_lr, "lr must be >= 0, got nan");
}

static void
test_resizing_keeps_what_was_there_and_zeroes_what_is_new(void)
{
    tensor t = tensor_make(1.0f);
    ct_optim *optim = adamw_make(1, 1);
    attach(optim, 0, 0, &t);
    CHECK(ct_optim_resize(optim, 3, 40, NULL) == CT_OK);
    CHECK(ct_optim_params_borrow(optim)[0].param == t.param);
    CHECK(ct_optim_params_borrow(optim)[39].param == NULL);
    CHECK(ct_optim_groups_borrow(optim)[0].adamw.lr == adamw.lr);
    CHECK(ct_optim_groups_borrow(optim)[2].adamw.lr == 0.0);
    CHECK(ct_optim_resize(optim, 1, 1, NULL) == CT_OK);
    CHECK(ct_optim_resize(optim, 3, 40, NULL) == CT_OK);
    CHECK(ct_optim_params_borrow(optim)[39].param == NULL);
    ct_optim_free(optim);
}

/* Each group's rule runs on its own parameters, in whatever order they come. */
static void
test_groups_may_be_of_different_kinds(void)
{
    tensor t[4] = {tensor_make(1.0f), tensor_make(2.0f), tensor_make(1.0f),
                   tensor_make(2.0f)};
    ct_optim *optim = adamw_make(2, 4);
    ct_optim_groups_borrow(optim)[1] =
        (ct_optim_group){.kind = CT_OPTIM_SGD, .sgd = {.lr = 0.5}};
    for (size_t i = 0; i < 4; i++) {
        attach(optim, i, i % 2, &t[i]);
    }
    CHECK(update(optim, 1.0, true, NULL) == CT_OK);
    for (size_t i = 0; i < 4; i++) {
        CHECK(fabsf(t[i].param[0] - (i % 2 == 0 ? 0.9f : 0.0f)) < 1e-6f);
        CHECK(t[i].grad[0] == 0.0f && ct_optim_params_borrow(optim)[i].step == 1);
        CHECK((t[i].m[0] != 0.0f) == (i % 2 == 0));
    }
    ct_optim_free(optim);
}

/* A model in bfloat16: its gradients, fp32 copies that are updated, and averages. */
static void
test_master_copies_feed_the_model_and_the_average(void)
{
    uint16_t grad[N], model[N];
    float master[N], ema[N], m[N] = {0}, v[N] = {0};
    ct_optim *optim = adamw_make(1, 1);
    for (size_t i = 0; i < N; i++) {
        grad[i] = ct_bf16_from_f32(1.0f);
        model[i] = ct_bf16_from_f32(1.0f);
        master[i] = 1.0f;
        ema[i] = 2.0f;
    }
    ct_optim_params_borrow(optim)[0] = (ct_optim_param){
        .param = master,
        .grad = grad,
        .state = {m, v},
        .copy = model,
        .ema = ema,
        .n = N,
        .grad_dtype = CT_BF16,
        .copy_dtype = CT_BF16,
    };
    const ct_optim_pass pass = {
        .grad_scale = 1.0, .zero_grads = true, .ema_decay = 0.75};
    CHECK(ct_optim_update(optim, &ct_the_stream, &pass, NULL) == CT_OK);
    for (size_t i = 0; i < N; i++) {
        CHECK(fabsf(master[i] - 0.9f) < 1e-6f && grad[i] == 0);
        CHECK(model[i] == ct_bf16_from_f32(master[i]));
        CHECK(ema[i] == 2.0f * 0.75f + 0.25f * ct_f32_from_bf16(model[i]));
    }
    ct_optim_free(optim);
}

static ct_status
whole_life(tensor *t, ct_error *err)
{
    double norm = 0.0;
    ct_optim *optim = ct_optim_new(&ct_device_streamed);
    if (optim == NULL) {
        return CT_ENOMEM;
    }
    ct_status status = ct_optim_resize(optim, 1, 1, err);
    if (status == CT_OK) {
        ct_optim_groups_borrow(optim)[0].adamw = adamw;
        attach(optim, 0, 0, t);
        status = norm_of(optim, &norm, err);
    }
    if (status == CT_OK) {
        status = update(optim, 1.0, true, err);
    }
    ct_optim_free(optim);
    return status;
}

static void
test_every_allocation_that_fails_is_reported_and_touches_nothing(void)
{
    size_t n = 1;
    ct_status status;
    do {
        tensor t = tensor_make(1.0f);
        const tensor before = t;
        ct_alloc_fail_after(n++);
        status = whole_life(&t, NULL);
        ct_alloc_fail_after(0);
        CHECK(status == CT_OK || status == CT_ENOMEM);
        CHECK((memcmp(&t, &before, sizeof t) == 0) == (status == CT_ENOMEM));
    } while (status == CT_ENOMEM);
    CHECK(n > 6); /* the object, five arrays and the sum's memory */
}

static void
test_a_failed_resize_keeps_the_old_arrays(void)
{
    tensor t = tensor_make(1.0f);
    ct_optim *optim = adamw_make(1, 1);
    attach(optim, 0, 0, &t);
    for (size_t n = 1; n <= 3; n++) {
        ct_error err;
        ct_alloc_fail_after(n);
        CHECK(ct_optim_resize(optim, 1, 100 * n, &err) == CT_ENOMEM);
        ct_alloc_fail_after(0);
        CHECK(ct_optim_params_borrow(optim)[0].param == t.param);
    }
    CHECK(update(optim, 1.0, false, NULL) == CT_OK);
    ct_optim_free(optim);
}

static void
test_a_steady_step_allocates_nothing(void)
{
    tensor t = tensor_make(1.0f);
    double norm = 0.0;
    ct_optim *optim = adamw_make(1, 1);
    attach(optim, 0, 0, &t);
    CHECK(norm_of(optim, &norm, NULL) == CT_OK);
    ct_alloc_fail_after(1);
    CHECK(ct_optim_resize(optim, 1, 1, NULL) == CT_OK);
    CHECK(norm_of(optim, &norm, NULL) == CT_OK);
    CHECK(update(optim, 1.0, true, NULL) == CT_OK);
    ct_alloc_fail_after(0);
    ct_optim_free(optim);
}

int
main(void)
{
    test_a_parameter_without_gradient_and_its_count_are_left_alone();
    test_parameters_of_a_group_may_be_at_different_steps();
    test_groups_have_their_own_hyperparameters_and_direction();
    test_the_norm_is_that_of_the_gradients_present();
    test_sgd_without_momentum_needs_no_state();
    test_sgd_starts_its_momentum_as_the_gradient_undampened();
    test_groups_may_be_of_different_kinds();
    test_master_copies_feed_the_model_and_the_average();
    test_a_rejected_update_changes_nothing();
    test_resizing_keeps_what_was_there_and_zeroes_what_is_new();
    test_every_allocation_that_fails_is_reported_and_touches_nothing();
    test_a_failed_resize_keeps_the_old_arrays();
    test_a_steady_step_allocates_nothing();
    ct_optim_free(NULL);
    return 0;
}
