#include "core/optim/lars.h"

#include "core/base/check.h"

static ct_status
config_check(const ct_lars_config *c, ct_error *err)
{
    ct_status status = c->clip
                           ? ct_check_positive("lr, which clip divides by,", c->lr, err)
                           : ct_check_least("lr", c->lr, 0.0, err);
    if (status == CT_OK) {
        status = ct_check_least("momentum", c->momentum, 0.0, err);
    }
    if (status == CT_OK) {
        status = ct_check_least("weight_decay", c->weight_decay, 0.0, err);
    }
    if (status == CT_OK) {
        status = ct_check_least("trust_coefficient", c->trust, 0.0, err);
    }
    if (status == CT_OK) {
        status = ct_check_least("eps", c->eps, 0.0, err);
    }
    if (status == CT_OK && c->nesterov && !(c->momentum > 0.0 && c->dampening == 0.0)) {
        return ct_fail(err, CT_EINVAL,
                       "nesterov needs momentum > 0 and dampening 0, got %g and %g",
                       c->momentum, c->dampening);
    }
    return status;
}

ct_status
ct_lars_coef_init(ct_lars_coef *coef, const ct_lars_config *c, bool first,
                  double grad_scale, ct_error *err)
{
    ct_status status = config_check(c, err);
    if (status != CT_OK) {
        return status;
    }
    *coef = (ct_lars_coef){
        .grad_scale = grad_scale,
        .lr = c->lr,
        .momentum = c->momentum,
        .one_minus_dampening = 1.0 - c->dampening,
        .weight_decay = c->weight_decay,
        .trust = c->trust,
        .eps = c->eps,
        .clip = c->clip,
        .nesterov = c->nesterov,
        .first = first,
    };
    return CT_OK;
}
