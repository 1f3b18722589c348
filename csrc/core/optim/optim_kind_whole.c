#include "core/optim/optim_kind_whole.h"

#include <math.h>

/* ---- Adafactor --------------------------------------------------------------------
 */

static bool
has_average(const ct_optim_group *group)
{
    return !isnan(group->adafactor.beta1);
}

ct_rule
ct_optim_adafactor_rule(const ct_optim_group *group)
{
    return has_average(group) ? CT_RULE_adafactor_momentum : CT_RULE_adafactor;
}

unsigned
ct_optim_adafactor_states(const ct_optim_group *group)
{
    return 1u << CT_ADAFACTOR_SQ | (has_average(group) ? 1u << CT_ADAFACTOR_AVG : 0u);
}

static bool
is_factored(const ct_optim_param *param)
{
    return param->ndim >= 2;
}

unsigned
ct_optim_adafactor_arrays(const ct_optim_group *group, const ct_optim_param *param)
{
    const unsigned square = is_factored(param)
                                ? 1u << CT_ADAFACTOR_ROW | 1u << CT_ADAFACTOR_COL
                                : 1u << CT_ADAFACTOR_SQ;
    return square | 1u << CT_ADAFACTOR_RMS |
           (ct_optim_adafactor_states(group) & 1u << CT_ADAFACTOR_AVG);
}

uint64_t
ct_optim_adafactor_key(const ct_optim_param *param)
{
    return 2 * (param->step + 1) + is_factored(param);
}

ct_status
ct_optim_adafactor_coef_init(ct_rule_coef *coef, const ct_optim_group *group,
                             uint64_t key, double grad_scale, ct_error *err)
{
    return ct_adafactor_coef_init(&coef->adafactor, &group->adafactor, key / 2,
                                  key % 2 != 0, grad_scale, err);
}

/* ---- LAMB -------------------------------------------------------------------------
 */

ct_rule
ct_optim_lamb_rule(const ct_optim_group *group)
{
    (void)group;
    return CT_RULE_lamb;
}

unsigned
ct_optim_lamb_states(const ct_optim_group *group)
{
    (void)group;
    return 3;
}

uint64_t
ct_optim_lamb_key(const ct_optim_param *param)
{
    return param->step + 1;
}

ct_status
ct_optim_lamb_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                        double grad_scale, ct_error *err)
{
    return ct_lamb_coef_init(&coef->lamb, &group->lamb, key, grad_scale, err);
}

/* ---- LARS -------------------------------------------------------------------------
 */

ct_rule
ct_optim_lars_rule(const ct_optim_group *group)
{
    return group->lars.momentum != 0.0 ? CT_RULE_lars_momentum : CT_RULE_lars;
}

unsigned
ct_optim_lars_states(const ct_optim_group *group)
{
    return group->lars.momentum != 0.0 ? 1 : 0;
}

uint64_t
ct_optim_lars_key(const ct_optim_param *param)
{
    return param->step == 0;
}

ct_status
ct_optim_lars_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                        double grad_scale, ct_error *err)
{
    return ct_lars_coef_init(&coef->lars, &group->lars, key != 0, grad_scale, err);
}

/* ---- Muon -------------------------------------------------------------------------
 */

ct_rule
ct_optim_muon_rule(const ct_optim_group *group)
{
    (void)group;
    return CT_RULE_muon;
}

unsigned
ct_optim_muon_states(const ct_optim_group *group)
{
    (void)group;
    return 1;
}

uint64_t
ct_optim_muon_key(const ct_optim_param *param)
{
    (void)param;
    return 0;
}

ct_status
ct_optim_muon_coef_init(ct_rule_coef *coef, const ct_optim_group *group, uint64_t key,
                        double grad_scale, ct_error *err)
{
    (void)key;
    return ct_muon_coef_init(&coef->muon, &group->muon, grad_scale, err);
}

ct_status
ct_optim_muon_check(const ct_optim_param *param, size_t i, ct_error *err)
{
    return param->ndim == 2
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "parameter %zu has %zu dimensions, and Muon is for "
                         "matrices: give it to another optimizer",
                         i, param->ndim);
}

/* ---- all of them -------------------------------------------------------------------
 */

bool
ct_optim_group_is_whole(const ct_optim_group *group)
{
    return ct_rule_is_measured(ct_optim_kinds[group->kind].rule(group)) != 0;
}
