/* Constants of every rule, for the tests that run all of them. C11 and C++. */
#ifndef CT_RULE_EXAMPLES_H
#define CT_RULE_EXAMPLES_H

#include "core/optim/optim.h"
#include "math/rules.h"
#include "ct_test.h"

#include <string.h>

enum {
    CT_RULE_VARIANTS = 3
};

/* Options that rules share, by variant. */
static const double ct_example_scale = 0.7;

static inline double
ct_example_lr(size_t variant)
{
    return 1e-3 * (double)(variant + 1);
}

static inline double
ct_example_decay(size_t variant)
{
    return 0.1 * (double)variant;
}

static inline double
ct_example_beta1(size_t variant)
{
    return variant == 1 ? 0.3 : 0.9;
}

/* The constants of a group's options, as ct_optim works them out. */
static inline ct_rule_coef
ct_example_of(const ct_optim_group *group, uint64_t key)
{
    ct_rule_coef coef;
    CHECK(ct_optim_check_group(group, NULL) == CT_OK);
    ct_optim_kinds[group->kind].coef(&coef, group, key, ct_example_scale);
    return coef;
}

static inline ct_optim_group
ct_example_group(ct_optim_kind kind)
{
    ct_optim_group group;
    memset(&group, 0, sizeof group);
    group.kind = kind;
    return group;
}

/* One with the options that Adam's variants share, whose configs begin alike. */
static inline ct_optim_group
ct_adam_example(ct_optim_kind kind, size_t variant)
{
    ct_optim_group group = ct_example_group(kind);
    group.adamw.lr = ct_example_lr(variant);
    group.adamw.beta1 = ct_example_beta1(variant);
    group.adamw.beta2 = 0.99;
    group.adamw.eps = 1e-6;
    group.adamw.weight_decay = ct_example_decay(variant);
    return group;
}

static inline ct_rule_coef
ct_adamw_example(size_t variant, bool decoupled)
{
    ct_optim_group group = ct_adam_example(CT_OPTIM_ADAMW, variant);
    group.adamw.decoupled = decoupled;
    return ct_example_of(&group, variant + 1);
}

static inline ct_rule_coef
ct_sgd_example(size_t variant, double momentum)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_SGD);
    group.sgd.lr = 0.1;
    group.sgd.momentum = momentum;
    group.sgd.dampening = variant == 1 ? 0.5 : 0.0;
    group.sgd.weight_decay = ct_example_decay(variant);
    group.sgd.nesterov = variant == 2 && momentum != 0.0;
    return ct_example_of(&group, variant == 0);
}

static inline ct_rule_coef
ct_adadelta_example(size_t variant)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_ADADELTA);
    group.adadelta.lr = 0.3;
    group.adadelta.rho = 0.9;
    group.adadelta.eps = 1e-6;
    group.adadelta.weight_decay = ct_example_decay(variant);
    return ct_example_of(&group, 0);
}

static inline ct_rule_coef
ct_adagrad_example(size_t variant)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_ADAGRAD);
    group.adagrad.lr = 0.1;
    group.adagrad.lr_decay = 0.01;
    group.adagrad.eps = 1e-10;
    group.adagrad.weight_decay = ct_example_decay(variant);
    return ct_example_of(&group, variant + 1);
}

/* fairseq's form is one of the variants. */
static inline ct_rule_coef
ct_adamax_example(size_t variant)
{
    ct_optim_group group = ct_adam_example(
        variant == 2 ? CT_OPTIM_FAIRSEQ_ADAMAX : CT_OPTIM_ADAMAX, variant);
    group.adamax.bias_correction = true;
    return ct_example_of(&group, variant + 1);
}

static inline ct_rule_coef
ct_ademamix_example(size_t variant)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_ADEMAMIX);
    group.ademamix.lr = ct_example_lr(variant);
    group.ademamix.beta1 = ct_example_beta1(variant);
    group.ademamix.beta2 = 0.99;
    group.ademamix.beta3 = 0.999;
    group.ademamix.alpha = 5.0;
    group.ademamix.t_alpha = 3.0;
    group.ademamix.t_beta3 = variant == 1 ? 2.5 : 7.0;
    group.ademamix.eps = 1e-6;
    group.ademamix.weight_decay = ct_example_decay(variant);
    return ct_example_of(&group, variant + 1);
}

static inline ct_rule_coef
ct_lion_example(size_t variant)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_LION);
    group.lion.lr = ct_example_lr(variant);
    group.lion.beta1 = ct_example_beta1(variant);
    group.lion.beta2 = 0.99;
    group.lion.weight_decay = ct_example_decay(variant);
    return ct_example_of(&group, 0);
}

static inline ct_rule_coef
ct_nadam_example(size_t variant)
{
    ct_optim_group group = ct_adam_example(CT_OPTIM_NADAM, variant);
    double product = 0.5;
    ct_optim_param param;
    memset(&param, 0, sizeof param);
    param.step = variant;
    param.product = &product;
    param.product_dtype = CT_F64;
    group.nadam.momentum_decay = 0.004;
    group.nadam.decoupled = variant == 2;
    ct_rule_coef coef = ct_example_of(&group, variant + 1);
    ct_optim_kinds[CT_OPTIM_NADAM].complete(&coef, &group, &param);
    return coef;
}

static inline ct_rule_coef
ct_nag_example(size_t variant)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_NAG);
    group.nag.lr = ct_example_lr(variant);
    group.nag.lr_old = 0.002;
    group.nag.momentum = 0.9;
    group.nag.weight_decay = ct_example_decay(variant);
    return ct_example_of(&group, 0);
}

static inline ct_rule_coef
ct_rmsprop_example(size_t variant)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_RMSPROP);
    group.rmsprop.lr = ct_example_lr(variant);
    group.rmsprop.alpha = variant == 1 ? 0.4 : 0.9;
    group.rmsprop.eps = 1e-6;
    group.rmsprop.weight_decay = ct_example_decay(variant);
    group.rmsprop.momentum = 0.9;
    group.rmsprop.centered = true;
    return ct_example_of(&group, 0);
}

static inline ct_rule_coef
ct_schedule_free_example(size_t variant)
{
    const ct_optim_ops *ops = &ct_optim_kinds[CT_OPTIM_SCHEDULE_FREE_ADAMW];
    ct_optim_group group = ct_adam_example(CT_OPTIM_SCHEDULE_FREE_ADAMW, variant);
    group.schedule_free.r = 0.5;
    group.schedule_free.weight_lr_power = 2.0;
    group.schedule_free.warmup_steps = 2.0;
    group.schedule_free.train_mode = true;
    for (size_t done = 0; done < variant; done++) {
        ops->advance(&group);
    }
    return ct_example_of(&group, 0);
}

/* Measured rules come settled, from sums that a parameter of 10 elements might have. */
static inline ct_rule_coef
ct_settled_example(ct_rule rule, ct_rule_coef coef)
{
    const double sums[CT_MEASURES] = {3.0, 2.0};
    ct_rule_settle(rule, &coef, sums, 10);
    return coef;
}

static inline ct_rule_coef
ct_lamb_example(size_t variant)
{
    ct_optim_group group = ct_adam_example(CT_OPTIM_LAMB, variant);
    group.lamb.lr = 1e-2;
    group.lamb.beta1 = 0.9;
    group.lamb.max_grad_norm = 1.0;
    group.lamb.bias_correction = variant != 1;
    group.lamb.grad_averaging = variant != 0;
    group.lamb.decoupled = variant != 2;
    group.lamb.trust_always = true;
    return ct_example_of(&group, variant + 1);
}

static inline ct_rule_coef
ct_lars_example(size_t variant, double momentum)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_LARS);
    group.lars.lr = 0.1;
    group.lars.momentum = momentum;
    group.lars.dampening = variant == 1 ? 0.5 : 0.0;
    group.lars.weight_decay = 0.1 * (double)variant;
    group.lars.trust = 0.02;
    group.lars.eps = 1e-8;
    group.lars.nesterov = variant == 2 && momentum != 0.0;
    group.lars.clip = variant == 0;
    return ct_example_of(&group, variant == 0);
}

static inline ct_rule_coef
ct_adafactor_example(size_t variant)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_ADAFACTOR);
    group.adafactor.lr = 1e-2;
    group.adafactor.eps = 1e-30;
    group.adafactor.eps2 = 1e-3;
    group.adafactor.clip_threshold = 1.0;
    group.adafactor.decay_rate = -0.8;
    group.adafactor.beta1 = 0.9;
    group.adafactor.weight_decay = 0.1 * (double)variant;
    group.adafactor.scale_parameter = variant != 0;
    group.adafactor.relative_step = variant == 1;
    return ct_example_of(&group, 2 * (variant + 2) + (variant == 2));
}

static inline ct_rule_coef
ct_muon_example(size_t variant)
{
    ct_optim_group group = ct_example_group(CT_OPTIM_MUON);
    group.muon.lr = 1e-2;
    group.muon.weight_decay = 0.1;
    group.muon.momentum = variant == 1 ? 0.3 : 0.95;
    group.muon.coefficients[0] = 3.4445;
    group.muon.coefficients[1] = -4.7750;
    group.muon.coefficients[2] = 2.0315;
    group.muon.eps = 1e-7;
    group.muon.steps = 5;
    group.muon.nesterov = variant != 2;
    return ct_example_of(&group, 0);
}

static inline ct_rule_coef
ct_descend_example(size_t variant)
{
    ct_rule_coef coef;
    coef.descend.decay = 1.0 - 0.1 * (double)variant;
    coef.descend.step_size = 0.01;
    return coef;
}

static inline ct_rule_coef
ct_block_example(ct_rule rule, size_t variant)
{
    ct_rule_coef coef;
    if (rule == CT_RULE_block_momentum || rule == CT_RULE_block_rejoin) {
        coef.block_momentum.momentum = 0.9;
        coef.block_momentum.lr = 0.7;
        coef.block_momentum.reach = variant == 0 ? 0.3 : 1.0;
        coef.block_momentum.look = (int)variant; /* one of each ct_block_look */
    }
    else {
        coef.block_share = ct_block_share_of(2 + (int)variant);
    }
    return coef;
}

/* variant < CT_RULE_VARIANTS: other options of the same rule. */
static inline ct_rule_coef
ct_rule_example(ct_rule rule, size_t variant)
{
    switch (rule) {
    case CT_RULE_adadelta:
        return ct_adadelta_example(variant);
    case CT_RULE_adagrad:
        return ct_adagrad_example(variant);
    case CT_RULE_adam:
    case CT_RULE_adam_amsgrad:
        return ct_adamw_example(variant, false);
    case CT_RULE_adamax:
        return ct_adamax_example(variant);
    case CT_RULE_adamw:
    case CT_RULE_adamw_amsgrad:
        return ct_adamw_example(variant, true);
    case CT_RULE_ademamix:
        return ct_ademamix_example(variant);
    case CT_RULE_lion:
        return ct_lion_example(variant);
    case CT_RULE_nadam:
        return ct_nadam_example(variant);
    case CT_RULE_nag:
        return ct_nag_example(variant);
    case CT_RULE_rmsprop:
    case CT_RULE_rmsprop_centered:
    case CT_RULE_rmsprop_centered_momentum:
    case CT_RULE_rmsprop_momentum:
        return ct_rmsprop_example(variant);
    case CT_RULE_schedule_free_adamw:
    case CT_RULE_schedule_free_sgd:
        return ct_schedule_free_example(variant);
    case CT_RULE_adafactor:
    case CT_RULE_adafactor_momentum:
        return ct_settled_example(rule, ct_adafactor_example(variant));
    case CT_RULE_block_delta:
    case CT_RULE_block_momentum:
    case CT_RULE_block_rejoin:
    case CT_RULE_block_share:
        return ct_block_example(rule, variant);
    case CT_RULE_descend:
        return ct_descend_example(variant);
    case CT_RULE_lamb:
        return ct_settled_example(rule, ct_lamb_example(variant));
    case CT_RULE_lars:
        return ct_settled_example(rule, ct_lars_example(variant, 0.0));
    case CT_RULE_lars_momentum:
        return ct_settled_example(rule, ct_lars_example(variant, 0.9));
    case CT_RULE_muon:
        return ct_muon_example(variant);
    case CT_RULE_muon_normalize:
        return ct_settled_example(rule, ct_muon_example(variant));
    case CT_RULE_sgd:
        return ct_sgd_example(variant, 0.0);
    case CT_RULE_sgd_momentum:
        return ct_sgd_example(variant, 0.9);
    case CT_RULE_COUNT:
        break;
    }
    CHECK(rule < CT_RULE_COUNT);
    return ct_sgd_example(0, 0.0);
}

#endif
