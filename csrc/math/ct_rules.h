/* The rules of ct_rules.def, by number, and their constants. */
#ifndef CT_RULES_H
#define CT_RULES_H

#include "math/ct_adadelta_math.h"
#include "math/ct_adagrad_math.h"
#include "math/ct_adamax_math.h"
#include "math/ct_adamw_math.h"
#include "math/ct_ademamix_math.h"
#include "math/ct_lion_math.h"
#include "math/ct_nag_math.h"
#include "math/ct_rmsprop_math.h"
#include "math/ct_schedule_free_math.h"
#include "math/ct_sgd_math.h"

typedef enum ct_rule {
#define CT_RULE(rule, constants, n_states) CT_RULE_##rule,
#include "math/ct_rules.def"
#undef CT_RULE
    CT_RULE_COUNT
} ct_rule;

enum {
    CT_RULE_MAX_STATES = 3
};

/* The constants of one step, by the rule's name. */
typedef union ct_rule_coef {
#define CT_RULE(rule, constants, n_states) ct_##constants##_coef rule;
#include "math/ct_rules.def"
#undef CT_RULE
} ct_rule_coef;

#endif
