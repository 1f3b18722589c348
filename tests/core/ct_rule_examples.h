/* Constants of every rule, for the tests that run all of them. C11 and C++. */
#ifndef CT_RULE_EXAMPLES_H
#define CT_RULE_EXAMPLES_H

#include "core/ct_adamw.h"
#include "core/ct_sgd.h"
#include "ct_test.h"
#include "math/ct_rules.h"

enum {
    CT_RULE_VARIANTS = 3
};

static inline ct_rule_coef
ct_adamw_example(size_t variant)
{
    ct_rule_coef coef;
    ct_adamw_config config;
    config.lr = 1e-3 * (double)(variant + 1);
    config.beta1 = variant == 1 ? 0.3 : 0.9;
    config.beta2 = 0.99;
    config.eps = 1e-6;
    config.weight_decay = 0.1 * (double)variant;
    CHECK(ct_adamw_coef_init(&coef.adamw, &config, variant + 1, 0.7, NULL) == CT_OK);
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
    config.weight_decay = 0.1 * (double)variant;
    config.nesterov = variant == 2 && momentum != 0.0;
    CHECK(ct_sgd_coef_init(&coef.sgd, &config, variant == 0, 0.7, NULL) == CT_OK);
    return coef;
}

/* variant < CT_RULE_VARIANTS: other options of the same rule. */
static inline ct_rule_coef
ct_rule_example(ct_rule rule, size_t variant)
{
    switch (rule) {
    case CT_RULE_adamw:
        return ct_adamw_example(variant);
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
