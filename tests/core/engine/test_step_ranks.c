/* Steps of several ranks, which must do the same or drift apart. */
#include "core/base/alloc.h"
#include "core/comm/collectives.h"
#include "core/engine/scaler.h"
#include "core/engine/step.h"
#include "ct_ranks.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

enum {
    RANKS = 4,
    STEPS = 12
};

/* A parameter of one element with lr 1, of which a rank's gradient is taken away. */
typedef struct fixture {
    ct_optim *optim;
    float grad, param;
    ct_step_config config;
} fixture;

static void
fixture_init(fixture *f, ct_comm *comm)
{
    *f = (fixture){
        .config = {.comm = comm, .zero_grads = true}
    };
    f->optim = ct_optim_new(&ct_device_cpu);
    CHECK(f->optim != NULL && ct_optim_resize(f->optim, 1, 1, NULL) == CT_OK);
    ct_optim_groups_borrow(f->optim)[0] =
        (ct_optim_group){.kind = CT_OPTIM_SGD, .sgd = {.lr = 1.0}};
    ct_optim_params_borrow(f->optim)[0] =
        (ct_optim_param){.param = &f->param, .grad = &f->grad, .n = 1, .dtype = CT_F32};
}

static ct_step_result
step(fixture *f, double loss_scale)
{
    ct_step_result r;
    CHECK(ct_step_measure(f->optim, NULL, &f->config, loss_scale, &r, NULL) == CT_OK);
    CHECK(ct_step_apply(f->optim, NULL, &f->config, loss_scale, &r, NULL) == CT_OK);
    return r;
}

typedef struct outcome {
    int64_t steps[RANKS];
    double scales[RANKS][STEPS];
    float params[RANKS];
} outcome;

/* At step 3 rank 2 has Inf, at step 7 rank 0 NaN. */
static float
gradient(int rank, int at)
{
    return at == 3 && rank == 2 ? INFINITY : at == 7 && rank == 0 ? NAN : 1.0f;
}

static void
train_with_overflows(ct_comm *comm, void *arg)
{
    outcome *seen = arg;
    const int rank = comm->rank;
    ct_scaler_config config = ct_scaler_preset(CT_SCALER_TORCH);
    ct_scaler scaler;
    fixture f;
    config.growth_interval = 3;
    CHECK(ct_scaler_init(&scaler, &config, NULL) == CT_OK);
    fixture_init(&f, comm);
    for (int at = 0; at < STEPS; at++) {
        f.grad = gradient(rank, at) * (float)scaler.scale;
        const ct_step_result r = step(&f, scaler.scale);
        CHECK(r.updated == r.finite && r.finite == (at != 3 && at != 7));
        CHECK(f.grad == 0.0f);
        CHECK(ct_scaler_update(&scaler, !r.finite, NULL) == CT_OK);
        seen->scales[rank][at] = scaler.scale;
    }
    seen->steps[rank] = (int64_t)ct_optim_params_borrow(f.optim)[0].step;
    seen->params[rank] = f.param;
    ct_optim_free(f.optim);
}

static void
test_an_overflow_on_any_rank_skips_the_step_on_all(void)
{
    static const double scales[STEPS] = {65536,  65536, 131072, 65536, 65536,  65536,
                                         131072, 65536, 65536,  65536, 131072, 131072};
    outcome seen;
    run_ranks(RANKS, 60.0, train_with_overflows, &seen);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK(memcmp(seen.scales[rank], scales, sizeof scales) == 0);
        CHECK(seen.steps[rank] == STEPS - 2 && seen.params[rank] == -(STEPS - 2.0f));
    }
}

static void
measure_own_and_global(ct_comm *comm, void *arg)
{
    fixture f;
    (void)arg;
    fixture_init(&f, comm);
    f.grad = (float)(comm->rank + 1);
    f.config.clip.max_norm = 100.0;
    CHECK(step(&f, 1.0).grad_norm == comm->rank + 1);
    f.grad = (float)(comm->rank + 1);
    f.config.global_norm = true;
    CHECK(step(&f, 1.0).grad_norm == sqrt(1.0 + 4.0 + 9.0 + 16.0));
    f.grad = 2.0f * 8.0f; /* of a loss times 8; the norm is 4 */
    f.config.clip.max_norm = 1.0;
    f.param = 0.0f;
    const ct_step_result r = step(&f, 8.0);
    CHECK(r.grad_norm == 4.0 && r.clip_coef == 1.0 / (4.0 + 1e-6));
    CHECK(fabs(f.param + 0.5) < 1e-6);
    ct_optim_free(f.optim);
}

/* Two groups of one parameter each; group 1 of rank r holds 3 * (r + 1). */
static void
clip_each_group_of_all_ranks(ct_comm *comm, void *arg)
{
    fixture f;
    const double *norm_type = arg;
    float grad = 3.0f * (float)(comm->rank + 1), param = 0.0f;
    fixture_init(&f, comm);
    CHECK(ct_optim_resize(f.optim, 2, 2, NULL) == CT_OK);
    ct_optim_groups_borrow(f.optim)[1] = ct_optim_groups_borrow(f.optim)[0];
    ct_optim_params_borrow(f.optim)[1] = (ct_optim_param){
        .param = &param, .grad = &grad, .n = 1, .dtype = CT_F32, .group = 1};
    f.grad = (float)(comm->rank + 1);
    f.config.global_norm = true;
    f.config.clip =
        (ct_clip){.max_norm = 1.0, .norm_type = *norm_type, .by_group = true};
    const double first = isinf(*norm_type) ? 4.0 : 10.0;
    const ct_step_result r = step(&f, 1.0);
    CHECK(r.grad_norm == first * (isinf(*norm_type) ? 3.0 : 4.0));
    CHECK(r.clip_coef == ct_clip_coef(1.0, 3.0 * first));
    CHECK(fabs(f.param + ct_clip_coef(1.0, first) * (comm->rank + 1)) < 1e-6);
    CHECK(fabs(param - f.param) < 1e-6);
    ct_optim_free(f.optim);
}

static void
test_groups_are_clipped_by_their_norm_over_all_ranks(void)
{
    double types[] = {1.0, INFINITY};
    for (size_t i = 0; i < 2; i++) {
        run_ranks(RANKS, 60.0, clip_each_group_of_all_ranks, &types[i]);
    }
}

static void
test_the_norm_is_a_ranks_own_unless_that_of_all_is_asked_for(void)
{
    run_ranks(RANKS, 60.0, measure_own_and_global, NULL);
}

static void
stop_everywhere(ct_comm *comm, void *arg)
{
    fixture f;
    ct_error err;
    ct_step_result r;
    (void)arg;
    fixture_init(&f, comm);
    f.config.nonfinite = CT_NONFINITE_STOP;
    f.grad = comm->rank == 1 ? INFINITY : 1.0f;
    CHECK(ct_step_measure(f.optim, NULL, &f.config, 1.0, &r, &err) == CT_OK);
    CHECK(ct_step_apply(f.optim, NULL, &f.config, 1.0, &r, &err) == CT_EFLOAT);
    CHECK(strstr(err.message, comm->rank == 1 ? "is inf" : "on another rank") != NULL);
    CHECK(f.param == 0.0f);
    ct_optim_free(f.optim);
}

static void
test_with_the_policy_to_stop_every_rank_stops(void)
{
    run_ranks(RANKS, 60.0, stop_everywhere, NULL);
}

static void
lose_a_rank(ct_comm *comm, void *arg)
{
    fixture f;
    ct_error err;
    ct_step_result r = {.grad_norm = -1.0};
    (void)arg;
    if (comm->rank == 3) {
        return;
    }
    fixture_init(&f, comm);
    f.grad = 1.0f;
    CHECK(ct_step_measure(f.optim, NULL, &f.config, 1.0, &r, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "rank 3 has left") != NULL && r.grad_norm == -1.0);
    ct_optim_free(f.optim);
}

static void
test_a_step_without_one_of_the_ranks_fails(void)
{
    run_ranks(RANKS, 60.0, lose_a_rank, NULL);
}

/* Rank 2 has measured nothing yet, and gets no memory to do it. */
static void
fail_on_one_rank(ct_comm *comm, void *arg)
{
    fixture f;
    ct_error err;
    double own = 0.0;
    ct_step_result r = {.grad_norm = -1.0};
    const bool fails = comm->rank == 2;
    fixture_init(&f, comm);
    f.config = *(const ct_step_config *)arg;
    f.config.comm = comm;
    f.grad = 1.0f;
    ct_grads *grads;
    CHECK(ct_optim_grads(f.optim, &grads, NULL) == CT_OK);
    CHECK(fails || ct_grads_sum(grads, NULL, 2.0, false, NULL) == CT_OK);
    CHECK(ct_comm_reduce_numbers(comm, &own, 1, CT_REDUCE_SUM, NULL) == CT_OK);
    if (fails) {
        ct_alloc_fail_after(1);
    }
    CHECK(ct_step_measure(f.optim, NULL, &f.config, 1.0, &r, &err) ==
          (fails ? CT_ENOMEM : CT_ECOMM));
    ct_alloc_fail_after(0);
    CHECK(fails || strstr(err.message, "not be measured on another rank") != NULL);
    CHECK(r.grad_norm == -1.0 && f.param == 0.0f);
    CHECK(step(&f, 1.0).updated && f.param == -1.0f); /* nothing has changed */
    ct_optim_free(f.optim);
}

/* A rank whose own scale is no number. */
static void
reject_on_one_rank(ct_comm *comm, void *arg)
{
    fixture f;
    ct_error err;
    ct_step_result r;
    (void)arg;
    fixture_init(&f, comm);
    CHECK(ct_step_measure(f.optim, NULL, &f.config, comm->rank == 1 ? NAN : 1.0, &r,
                          &err) == (comm->rank == 1 ? CT_EINVAL : CT_ECOMM));
    ct_optim_free(f.optim);
}

static void
test_what_fails_on_one_rank_before_they_meet_fails_on_all(void)
{
    ct_step_config configs[] = {
        {.zero_grads = false},
        {.global_norm = true},
        {.global_norm = true, .clip = {.max_norm = 100.0, .by_group = true}},
        {.global_norm = true, .clip = {.norm_type = INFINITY}},
    };
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        run_ranks(RANKS, 60.0, fail_on_one_rank, &configs[i]);
    }
    run_ranks(RANKS, 60.0, reject_on_one_rank, NULL);
}

int
main(void)
{
    test_what_fails_on_one_rank_before_they_meet_fails_on_all();
    test_an_overflow_on_any_rank_skips_the_step_on_all();
    test_the_norm_is_a_ranks_own_unless_that_of_all_is_asked_for();
    test_groups_are_clipped_by_their_norm_over_all_ranks();
    test_with_the_policy_to_stop_every_rank_stops();
    test_a_step_without_one_of_the_ranks_fails();
    return 0;
}
