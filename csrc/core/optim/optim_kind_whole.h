/* The kinds whose rules look at a whole parameter, for core/optim/kinds.c alone. */
#ifndef CT_OPTIM_KIND_WHOLE_H
#define CT_OPTIM_KIND_WHOLE_H

#include "core/optim/kinds.h"

/* ct_optim_<kind>_rule and the other functions of a ct_optim_ops. */
#define CT_OPTIM_FUNCTIONS(kind)                                                       \
    ct_rule ct_optim_##kind##_rule(const ct_optim_group *group);                       \
    unsigned ct_optim_##kind##_states(const ct_optim_group *group);                    \
    uint64_t ct_optim_##kind##_key(const ct_optim_param *param);                       \
    ct_status ct_optim_##kind##_coef_init(ct_rule_coef *coef,                          \
                                          const ct_optim_group *group, uint64_t key,   \
                                          double grad_scale, ct_error *err)

CT_OPTIM_FUNCTIONS(adafactor);
CT_OPTIM_FUNCTIONS(lamb);
CT_OPTIM_FUNCTIONS(lars);
CT_OPTIM_FUNCTIONS(muon);

unsigned
ct_optim_adafactor_arrays(const ct_optim_group *group, const ct_optim_param *param);
ct_status ct_optim_muon_check(const ct_optim_param *param, size_t i, ct_error *err);

#define CT_OPTIM_WHOLE(kind)                                                           \
    .name = #kind, .rule = ct_optim_##kind##_rule, .states = ct_optim_##kind##_states, \
    .key = ct_optim_##kind##_key, .coef_init = ct_optim_##kind##_coef_init

#endif
