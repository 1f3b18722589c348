#include "core/ct_optim_kind.h"

/* Constants that depend on the number of the update. */
static uint64_t
key_of_step(const ct_optim_param *param)
{
    return param->step + 1;
}

/* Constants that differ at a parameter's first update alone. */
static uint64_t
key_of_first(const ct_optim_param *param)
{
    return param->step == 0;
}

/* ---- AdamW ------------------------------------------------------------------------
 */

static ct_rule
adamw_rule(const ct_optim_group *group)
{
    (void)group;
    return CT_RULE_adamw;
}

static unsigned
adamw_states(const ct_optim_group *group)
{
    (void)group;
    return 3;
}

static ct_status
adamw_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                double grad_scale, ct_error *err)
{
    return ct_adamw_coef_init(&coef->adamw, &group->adamw, key, grad_scale, err);
}

/* ---- SGD --------------------------------------------------------------------------
 */

static ct_rule
sgd_rule(const ct_optim_group *group)
{
    return group->sgd.momentum != 0.0 ? CT_RULE_sgd_momentum : CT_RULE_sgd;
}

static unsigned
sgd_states(const ct_optim_group *group)
{
    return group->sgd.momentum != 0.0 ? 1 : 0;
}

static ct_status
sgd_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
              double grad_scale, ct_error *err)
{
    return ct_sgd_coef_init(&coef->sgd, &group->sgd, key != 0, grad_scale, err);
}

const ct_optim_ops ct_optim_kinds[CT_OPTIM_KIND_COUNT] = {
    [CT_OPTIM_ADAMW] = {"adamw", adamw_rule, adamw_states, key_of_step,
                        adamw_coef_init                                               },
    [CT_OPTIM_SGD] = {"sgd",   sgd_rule,   sgd_states,   key_of_first, sgd_coef_init},
};
