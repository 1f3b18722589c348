/* Ranges of hyperparameters, of every kind of optimizer, and what an update changes in
 * a group. */
#include "core/optim/optim.h"
#include "ct_test.h"

#include <math.h>
#include <string.h>

/* ---- groups of every kind -------------------------------------------------------- */

static ct_optim_group
group_of(ct_optim_kind kind)
{
    ct_optim_group group;
    memset(&group, 0, sizeof group); /* 0 is in every range */
    group.kind = kind;
    group.schedule_free.train_mode |= kind == CT_OPTIM_SCHEDULE_FREE_ADAMW ||
                                      kind == CT_OPTIM_SCHEDULE_FREE_RADAM ||
                                      kind == CT_OPTIM_SCHEDULE_FREE_SGD;
    return group;
}

/* Puts a value out of range into the number `member` bytes into the group. */
static void
check_named(ct_optim_kind kind, size_t member, double value, const char *name)
{
    ct_error err;
    ct_optim_group group = group_of(kind);
    CHECK(ct_optim_check_group(&group, &err) == CT_OK);
    memcpy((char *)&group + member, &value, sizeof value);
    CHECK(ct_optim_check_group(&group, &err) == CT_EINVAL);
    CHECK(strncmp(err.message, name, strlen(name)) == 0);
    value = NAN;
    memcpy((char *)&group + member, &value, sizeof value);
    CHECK(ct_optim_check_group(&group, &err) == CT_EINVAL);
    CHECK(strncmp(err.message, name, strlen(name)) == 0);
}

#define CHECK_NAMED(kind, config, field, value)                                        \
    check_named(kind, offsetof(ct_optim_group, config.field), value, #field)

/* The same of a number of an option of several. */
#define CHECK_NAMED_IN(kind, config, field, value, name)                               \
    check_named(kind, offsetof(ct_optim_group, config.field), value, name)

static void
test_every_option_of_every_kind_is_checked_and_named(void)
{
    static const ct_optim_kind adams[] = {CT_OPTIM_ADAMW, CT_OPTIM_ADAM,
                                          CT_OPTIM_FAIRSEQ_ADAM, CT_OPTIM_RADAM,
                                          CT_OPTIM_ADAMW_8BIT};
    for (size_t i = 0; i < sizeof adams / sizeof *adams; i++) {
        CHECK_NAMED(adams[i], adamw, lr, -1.0);
        CHECK_NAMED_IN(adams[i], adamw, beta1, 1.0, "betas[0] must be in [0, 1)");
        CHECK_NAMED_IN(adams[i], adamw, beta2, 1.0, "betas[1] must be in [0, 1)");
        CHECK_NAMED(adams[i], adamw, eps, -1.0);
        CHECK_NAMED(adams[i], adamw, weight_decay, -1.0);
    }
    for (int i = 0; i < 2; i++) {
        const ct_optim_kind kind = i ? CT_OPTIM_FAIRSEQ_ADAMAX : CT_OPTIM_ADAMAX;
        CHECK_NAMED(kind, adamax, lr, -1.0);
        CHECK_NAMED_IN(kind, adamax, beta1, 1.0, "betas[0] must be in [0, 1)");
        CHECK_NAMED_IN(kind, adamax, beta2, -0.1, "betas[1] must be in [0, 1)");
        CHECK_NAMED(kind, adamax, eps, -1.0);
        CHECK_NAMED(kind, adamax, weight_decay, -1.0);
    }
    CHECK_NAMED(CT_OPTIM_ADEMAMIX, ademamix, lr, -1.0);
    CHECK_NAMED_IN(CT_OPTIM_ADEMAMIX, ademamix, beta1, 1.0,
                   "betas[0] must be in [0, 1)");
    CHECK_NAMED_IN(CT_OPTIM_ADEMAMIX, ademamix, beta2, 1.0,
                   "betas[1] must be in [0, 1)");
    CHECK_NAMED_IN(CT_OPTIM_ADEMAMIX, ademamix, beta3, 1.0,
                   "betas[2] must be in [0, 1)");
    CHECK_NAMED(CT_OPTIM_ADEMAMIX, ademamix, alpha, -1.0);
    CHECK_NAMED(CT_OPTIM_ADEMAMIX, ademamix, eps, -1.0);
    CHECK_NAMED(CT_OPTIM_ADEMAMIX, ademamix, weight_decay, -1.0);
    CHECK_NAMED(CT_OPTIM_NADAM, nadam, lr, -1.0);
    CHECK_NAMED_IN(CT_OPTIM_NADAM, nadam, beta1, 1.0, "betas[0] must be in [0, 1)");
    CHECK_NAMED_IN(CT_OPTIM_NADAM, nadam, beta2, 1.0, "betas[1] must be in [0, 1)");
    CHECK_NAMED(CT_OPTIM_NADAM, nadam, eps, -1.0);
    CHECK_NAMED(CT_OPTIM_NADAM, nadam, weight_decay, -1.0);
    CHECK_NAMED(CT_OPTIM_NADAM, nadam, momentum_decay, -1.0);
    CHECK_NAMED(CT_OPTIM_ADAGRAD, adagrad, lr, -1.0);
    CHECK_NAMED(CT_OPTIM_ADAGRAD, adagrad, lr_decay, -1.0);
    CHECK_NAMED(CT_OPTIM_ADAGRAD, adagrad, eps, -1.0);
    CHECK_NAMED(CT_OPTIM_ADAGRAD, adagrad, weight_decay, -1.0);
    CHECK_NAMED(CT_OPTIM_ADADELTA, adadelta, lr, -1.0);
    CHECK_NAMED(CT_OPTIM_ADADELTA, adadelta, rho, 1.1);
    CHECK_NAMED(CT_OPTIM_ADADELTA, adadelta, eps, -1.0);
    CHECK_NAMED(CT_OPTIM_ADADELTA, adadelta, weight_decay, -1.0);
    CHECK_NAMED(CT_OPTIM_RMSPROP, rmsprop, lr, -1.0);
    CHECK_NAMED(CT_OPTIM_RMSPROP, rmsprop, alpha, -1.0);
    CHECK_NAMED(CT_OPTIM_RMSPROP, rmsprop, eps, -1.0);
    CHECK_NAMED(CT_OPTIM_RMSPROP, rmsprop, weight_decay, -1.0);
    CHECK_NAMED(CT_OPTIM_RMSPROP, rmsprop, momentum, -1.0);
    CHECK_NAMED(CT_OPTIM_LION, lion, lr, -1.0);
    CHECK_NAMED_IN(CT_OPTIM_LION, lion, beta1, 1.0, "betas[0] must be in [0, 1)");
    CHECK_NAMED_IN(CT_OPTIM_LION, lion, beta2, 1.0, "betas[1] must be in [0, 1)");
    CHECK_NAMED(CT_OPTIM_LION, lion, weight_decay, -1.0);
    CHECK_NAMED(CT_OPTIM_NAG, nag, lr, -1.0);
    CHECK_NAMED(CT_OPTIM_NAG, nag, momentum, -1.0);
    CHECK_NAMED(CT_OPTIM_NAG, nag, weight_decay, -1.0);
}

static void
test_every_option_of_schedule_free_is_checked_and_named(void)
{
    static const ct_optim_kind kinds[] = {CT_OPTIM_SCHEDULE_FREE_ADAMW,
                                          CT_OPTIM_SCHEDULE_FREE_RADAM,
                                          CT_OPTIM_SCHEDULE_FREE_SGD};
    for (size_t i = 0; i < 3; i++) {
        CHECK_NAMED(kinds[i], schedule_free, lr, -1.0);
        const bool is_sgd = kinds[i] == CT_OPTIM_SCHEDULE_FREE_SGD;
        CHECK_NAMED_IN(kinds[i], schedule_free, beta1, 1.0,
                       is_sgd ? "momentum" : "betas[0]");
        if (!is_sgd) {
            CHECK_NAMED_IN(kinds[i], schedule_free, beta2, 1.0, "betas[1]");
            CHECK_NAMED(kinds[i], schedule_free, eps, -1.0);
        }
        CHECK_NAMED(kinds[i], schedule_free, weight_decay, -1.0);
        CHECK_NAMED(kinds[i], schedule_free, r, -1.0);
        CHECK_NAMED(kinds[i], schedule_free, weight_lr_power, -1.0);
        if (kinds[i] != CT_OPTIM_SCHEDULE_FREE_RADAM) {
            CHECK_NAMED(kinds[i], schedule_free, warmup_steps, -1.0);
        }
        CHECK_NAMED(kinds[i], schedule_free, weight_sum, -1.0);
        ct_error err;
        ct_optim_group group = group_of(kinds[i]);
        group.schedule_free.train_mode = false;
        CHECK(ct_optim_check_group(&group, &err) == CT_EINVAL);
        CHECK(strstr(err.message, "train()") != NULL);
    }
}

/* ---- what an update changes in a group ------------------------------------------- */

static void
test_an_update_advances_its_groups_and_a_rejected_one_does_not(void)
{
    float grad = 1.0f, param = 1.0f, buffer = 0.0f;
    const ct_optim_pass pass = {.grad_scale = 1.0};
    ct_optim *optim = ct_optim_new(&ct_device_cpu);
    CHECK(optim != NULL && ct_optim_resize(optim, 2, 1, NULL) == CT_OK);
    ct_optim_group *groups = ct_optim_groups_borrow(optim);
    groups[0] = group_of(CT_OPTIM_NAG);
    groups[0].nag = (ct_nag_config){.lr = 0.5, .lr_old = NAN, .momentum = 0.9};
    groups[1] = group_of(CT_OPTIM_SCHEDULE_FREE_SGD); /* and no parameter in it */
    groups[1].schedule_free.lr = 2.0;
    groups[1].schedule_free.weight_lr_power = 2.0;
    ct_optim_params_borrow(optim)[0] =
        (ct_optim_param){.param = &param, .grad = &grad, .n = 1, .state = {&buffer}};
    CHECK(ct_optim_update(optim, NULL, &pass, NULL) == CT_OK);
    CHECK(groups[0].nag.lr_old == 0.5);
    CHECK(groups[1].schedule_free.k == 1 && groups[1].schedule_free.weight_sum == 4.0);
    CHECK(groups[1].schedule_free.lr_max == 2.0);
    groups[0].nag.lr = -1.0;
    CHECK(ct_optim_update(optim, NULL, &pass, NULL) == CT_EINVAL);
    CHECK(groups[0].nag.lr_old == 0.5 && groups[1].schedule_free.k == 1);
    ct_optim_free(optim);
}

/* Without a last rate there is nothing to correct; a last rate of 0 multiplies by the
 * rate, as fairseq has it. */
static void
test_nag_rescales_its_momentum_with_the_rate(void)
{
    static const struct {
        double lr_old, carry;
    } cases[] = {
        {NAN, 0.9 },
        {0.5, 0.9 },
        {1.0, 0.45},
        {0.0, 0.45},
        {0.1, 4.5 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ct_rule_coef coef;
        ct_optim_group group = group_of(CT_OPTIM_NAG);
        group.nag =
            (ct_nag_config){.lr = 0.5, .lr_old = cases[i].lr_old, .momentum = 0.9};
        ct_optim_kinds[CT_OPTIM_NAG].coef(&coef, &group, 0, 1.0);
        CHECK(fabs(coef.nag.carry - cases[i].carry) < 1e-15 * 8);
        CHECK(coef.nag.ahead == 0.9 * coef.nag.carry);
    }
}

/* Liu et al., 2020: with beta2 = 0.999 the rate is adapted from step 6 on, with a
 * threshold of 4 from step 5 on, and the factor tends to 1. */
static double
rectification_of(uint64_t step, double beta2)
{
    ct_rule_coef coef;
    ct_optim_group group = group_of(CT_OPTIM_RADAM);
    group.adamw.lr = 1.0;
    group.adamw.beta2 = beta2;
    ct_optim_kinds[CT_OPTIM_RADAM].coef(&coef, &group, step, 1.0);
    return coef.adamw.inv_bias2 == 0.0 ? 0.0 : coef.adamw.step_size;
}

static bool
schedule_free_adapts(uint64_t step)
{
    ct_rule_coef coef;
    ct_optim_group group = group_of(CT_OPTIM_SCHEDULE_FREE_RADAM);
    group.schedule_free.beta2 = 0.999;
    group.schedule_free.k = step - 1;
    ct_optim_kinds[CT_OPTIM_SCHEDULE_FREE_RADAM].coef(&coef, &group, 0, 1.0);
    return coef.schedule_free_adamw.inv_bias2 != 0.0;
}

static void
test_rectification_begins_when_the_average_is_long_enough(void)
{
    CHECK(rectification_of(5, 0.999) == 0.0);
    CHECK(rectification_of(6, 0.999) > 0.0);
    CHECK(!schedule_free_adapts(4) && schedule_free_adapts(5));
    CHECK(fabs(rectification_of(100000, 0.999) - 1.0) < 1e-12);
    CHECK(rectification_of(100, 0.0) == 0.0);
}

static void
test_ranges_are_named_as_the_options_are(void)
{
    CHECK_NAMED_IN(CT_OPTIM_ADADELTA, adadelta, rho, 1.1, "rho must be in [0, 1], got");
    CHECK_NAMED_IN(CT_OPTIM_ADAGRAD, adagrad, lr, -0.5, "lr must be >= 0, got");
    CHECK_NAMED_IN(CT_OPTIM_SGD, sgd, dampening, NAN, "dampening must be a number");
    ct_error err;
    ct_optim_group group = group_of(CT_OPTIM_ADAFACTOR);
    CHECK(ct_optim_check_group(&group, &err) == CT_EINVAL);
    CHECK(strcmp(err.message, "clip_threshold must be > 0, got 0") == 0);
    group.adafactor.clip_threshold = 1.0;
    group.adafactor.decay_rate = 0.5;
    CHECK(ct_optim_check_group(&group, &err) == CT_EINVAL);
    CHECK(strcmp(err.message, "decay_rate must be <= 0, got 0.5") == 0);
    group.adafactor.decay_rate = 0.0;
    group.adafactor.beta1 = NAN; /* there is none */
    CHECK(ct_optim_check_group(&group, &err) == CT_OK);
}

int
main(void)
{
    test_ranges_are_named_as_the_options_are();
    test_every_option_of_every_kind_is_checked_and_named();
    test_every_option_of_schedule_free_is_checked_and_named();
    test_an_update_advances_its_groups_and_a_rejected_one_does_not();
    test_nag_rescales_its_momentum_with_the_rate();
    test_rectification_begins_when_the_average_is_long_enough();
    return 0;
}
