/* Constants of every rule, for the tests that run all of them. C11 and C++. */
#ifndef CT_RULE_EXAMPLES_H
#define CT_RULE_EXAMPLES_H

#include "core/optim/adagrad.h"
#include "core/optim/adafactor.h"
#include "core/optim/adam.h"
#include "core/optim/layerwise.h"
#include "core/optim/sgd.h"
#include "core/optim/muon.h"
#include "core/optim/schedule_free.h"
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

static inline ct_rule_coef
ct_adamw_example(size_t variant, bool decoupled)
{
    ct_rule_coef coef;
    ct_adamw_config config;
    memset(&config, 0, sizeof config);
    config.lr = ct_example_lr(variant);
    config.beta1 = ct_example_beta1(variant);
    config.beta2 = 0.99;
    config.eps = 1e-6;
    config.weight_decay = ct_example_decay(variant);
    config.decoupled = decoupled;
    CHECK(ct_adamw_coef_init(&coef.adamw, &config, variant + 1, ct_example_scale,
                             NULL) == CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_sgd_example(size_t variant, double momentum)
{
    ct_rule_coef coef;
    ct_sgd_config config;
    config.lr = 0.1;
    config.momentum = momentum;
    config.dampening = variant == 1 ? 0.5 : 0.0;
    config.weight_decay = ct_example_decay(variant);
    config.nesterov = variant == 2 && momentum != 0.0;
    CHECK(ct_sgd_coef_init(&coef.sgd, &config, variant == 0, ct_example_scale, NULL) ==
          CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_adadelta_example(size_t variant)
{
    ct_rule_coef coef;
    const ct_adadelta_config config = {0.3, 0.9, 1e-6, ct_example_decay(variant)};
    CHECK(ct_adadelta_coef_init(&coef.adadelta, &config, ct_example_scale, NULL) ==
          CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_adagrad_example(size_t variant)
{
    ct_rule_coef coef;
    const ct_adagrad_config config = {0.1, 0.01, 1e-10, ct_example_decay(variant)};
    CHECK(ct_adagrad_coef_init(&coef.adagrad, &config, variant + 1, ct_example_scale,
                               NULL) == CT_OK);
    return coef;
}

/* fairseq's form is one of the variants. */
static inline ct_rule_coef
ct_adamax_example(size_t variant)
{
    ct_rule_coef coef;
    const ct_adamax_config config = {ct_example_lr(variant),
                                     ct_example_beta1(variant),
                                     0.99,
                                     1e-6,
                                     ct_example_decay(variant),
                                     true};
    CHECK((variant == 2 ? ct_fairseq_adamax_coef_init : ct_adamax_coef_init)(
              &coef.adamax, &config, variant + 1, ct_example_scale, NULL) == CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_ademamix_example(size_t variant)
{
    ct_rule_coef coef;
    const ct_ademamix_config config = {ct_example_lr(variant),
                                       ct_example_beta1(variant),
                                       0.99,
                                       0.999,
                                       5.0,
                                       3.0,
                                       variant == 1 ? 2.5 : 7.0,
                                       1e-6,
                                       ct_example_decay(variant)};
    CHECK(ct_ademamix_coef_init(&coef.ademamix, &config, variant + 1, ct_example_scale,
                                NULL) == CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_lion_example(size_t variant)
{
    ct_rule_coef coef;
    const ct_lion_config config = {ct_example_lr(variant), ct_example_beta1(variant),
                                   0.99, ct_example_decay(variant)};
    CHECK(ct_lion_coef_init(&coef.lion, &config, ct_example_scale, NULL) == CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_nadam_example(size_t variant)
{
    ct_rule_coef coef;
    const ct_nadam_config config = {ct_example_lr(variant),
                                    ct_example_beta1(variant),
                                    0.99,
                                    1e-6,
                                    ct_example_decay(variant),
                                    0.004,
                                    variant == 2};
    CHECK(ct_nadam_coef_init(&coef.nadam, &config, variant + 1, ct_example_scale,
                             NULL) == CT_OK);
    ct_nadam_coef_complete(&coef.nadam, &config, variant + 1, 0.4);
    return coef;
}

static inline ct_rule_coef
ct_nag_example(size_t variant)
{
    ct_rule_coef coef;
    const ct_nag_config config = {ct_example_lr(variant), 0.002, 0.9,
                                  ct_example_decay(variant)};
    CHECK(ct_nag_coef_init(&coef.nag, &config, ct_example_scale, NULL) == CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_rmsprop_example(size_t variant)
{
    ct_rule_coef coef;
    const ct_rmsprop_config config = {ct_example_lr(variant),
                                      variant == 1 ? 0.4 : 0.9,
                                      1e-6,
                                      ct_example_decay(variant),
                                      0.9,
                                      true};
    CHECK(ct_rmsprop_coef_init(&coef.rmsprop, &config, ct_example_scale, NULL) ==
          CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_schedule_free_example(size_t variant)
{
    ct_rule_coef coef;
    ct_schedule_free_config config;
    memset(&config, 0, sizeof config);
    config.lr = ct_example_lr(variant);
    config.beta1 = ct_example_beta1(variant);
    config.beta2 = 0.99;
    config.eps = 1e-6;
    config.weight_decay = ct_example_decay(variant);
    config.r = 0.5;
    config.weight_lr_power = 2.0;
    config.warmup_steps = 2.0;
    config.train_mode = true;
    for (size_t done = 0; done < variant; done++) {
        ct_schedule_free_advance(&config);
    }
    CHECK(ct_schedule_free_coef_init(&coef.schedule_free_adamw, &config,
                                     ct_example_scale, NULL) == CT_OK);
    return coef;
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
    ct_rule_coef coef;
    ct_lamb_config config;
    config.lr = 1e-2;
    config.beta1 = 0.9;
    config.beta2 = 0.99;
    config.eps = 1e-6;
    config.weight_decay = 0.1 * (double)variant;
    config.max_grad_norm = 1.0;
    config.bias_correction = variant != 1;
    config.grad_averaging = variant != 0;
    config.decoupled = variant != 2;
    config.trust_always = true;
    CHECK(ct_lamb_coef_init(&coef.lamb, &config, variant + 1, 0.7, NULL) == CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_lars_example(size_t variant, double momentum)
{
    ct_rule_coef coef;
    ct_lars_config config;
    config.lr = 0.1;
    config.momentum = momentum;
    config.dampening = variant == 1 ? 0.5 : 0.0;
    config.weight_decay = 0.1 * (double)variant;
    config.trust = 0.02;
    config.eps = 1e-8;
    config.nesterov = variant == 2 && momentum != 0.0;
    config.clip = variant == 0;
    CHECK(ct_lars_coef_init(&coef.lars, &config, variant == 0, 0.7, NULL) == CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_adafactor_example(size_t variant)
{
    ct_rule_coef coef;
    ct_adafactor_config config;
    config.lr = 1e-2;
    config.eps = 1e-30;
    config.eps2 = 1e-3;
    config.clip_threshold = 1.0;
    config.decay_rate = -0.8;
    config.beta1 = 0.9;
    config.weight_decay = 0.1 * (double)variant;
    config.scale_parameter = variant != 0;
    config.relative_step = variant == 1;
    config.warmup_init = false;
    CHECK(ct_adafactor_coef_init(&coef.adafactor, &config, variant + 2, variant == 2,
                                 0.7, NULL) == CT_OK);
    return coef;
}

static inline ct_rule_coef
ct_muon_example(size_t variant)
{
    ct_rule_coef coef;
    ct_muon_config config;
    config.lr = 1e-2;
    config.weight_decay = 0.1;
    config.momentum = variant == 1 ? 0.3 : 0.95;
    config.coefficients[0] = 3.4445;
    config.coefficients[1] = -4.7750;
    config.coefficients[2] = 2.0315;
    config.eps = 1e-7;
    config.steps = 5;
    config.nesterov = variant != 2;
    config.adjust = CT_MUON_ORIGINAL;
    CHECK(ct_muon_coef_init(&coef.muon, &config, 0.7, NULL) == CT_OK);
    return coef;
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
