/* The rules of math/rules.def, by number, and their constants. */
#ifndef CT_RULES_H
#define CT_RULES_H

#include "math/block.h"
#include "math/parts.h"

#define CT_FORMULA "math/rules.def"
#include "math/each_real.h"

#include <stddef.h>

typedef enum ct_rule {
#define CT_RULE(rule, constants, n_states) CT_RULE_##rule,
#include "math/rules.def"
#undef CT_RULE
    CT_RULE_COUNT
} ct_rule;

enum {
    CT_RULE_MAX_STATES = 3
};

/* The constants of one step, by the rule's name. */
typedef union ct_rule_coef {
    double grad_scale; /* the first constant of every rule that takes gradients */
#define CT_RULE(rule, constants, n_states) ct_##constants##_coef rule;
#include "math/rules.def"
#undef CT_RULE
} ct_rule_coef;

enum {
    CT_MEASURES = 2 /* sums of a measured rule */
};

CT_HD static inline int
ct_rule_is_measured(ct_rule rule)
{
    switch (rule) {
#define CT_MEASURED(rule, constants, n_states) case CT_RULE_##rule:
#include "math/measured.def"
#undef CT_MEASURED
        return 1;
    default:
        return 0;
    }
}

/* Completes the constants of a measured rule for a parameter of n elements. */
CT_HD static inline void
ct_rule_settle(ct_rule rule, ct_rule_coef *coef, const double *sums, size_t n)
{
    switch (rule) {
#define CT_MEASURED(rule, constants, n_states)                                         \
    case CT_RULE_##rule:                                                               \
        ct_##constants##_settle(&coef->rule, sums, (double)n);                         \
        break;
#include "math/measured.def"
#undef CT_MEASURED
    default:
        break;
    }
}

#endif
