/* What differs between kinds of optimizers, for core/optim/optim.c alone: a table of a
 * few functions. A new kind that works element by element is an entry here and a rule
 * (math/rules.def). */
#ifndef CORE_OPTIM_KINDS_H
#define CORE_OPTIM_KINDS_H

#include "core/optim/optim.h"

typedef struct ct_optim_ops {
    const char *name;
    ct_rule (*rule)(const ct_optim_group *group);
    /* Which of a parameter's state arrays the rule works on, in the rule's order; bit k
     * says state[k]. */
    unsigned (*states)(const ct_optim_group *group);
    /* Parameters of a group with the same key have the same constants. */
    uint64_t (*key)(const ct_optim_param *param);
    ct_status (*coef_init)(ct_rule_coef *coef, const ct_optim_group *group,
                           uint64_t key, double grad_scale, ct_error *err);
    /* What in the constants is one parameter's alone, and what an update changes in it;
     * or NULL. */
    void (*complete)(ct_rule_coef *coef, const ct_optim_group *group,
                     const ct_optim_param *param);
    void (*count)(const ct_optim_group *group, const ct_optim_param *param);
    /* Notes in the group that an update has been done, or NULL. */
    void (*advance)(ct_optim_group *group);
    /* Which arrays a parameter has, where that depends on its shape; NULL: states. */
    unsigned (*arrays)(const ct_optim_group *group, const ct_optim_param *param);
    /* CT_EINVAL names what is wrong with the shape of parameter i; NULL: any will do.
     */
    ct_status (*check)(const ct_optim_param *param, size_t i, ct_error *err);
} ct_optim_ops;

extern const ct_optim_ops ct_optim_kinds[CT_OPTIM_KIND_COUNT];

#endif
