/* LAMB and LARS, whose learning rates depend on the norms of a whole parameter:
 * hyperparameters, their ranges, and the constants of a step. */
#include "core/optim/layerwise.h"

#include "core/base/check.h"

static ct_status
config_check(const ct_lamb_config *c, ct_error *err)
{
    ct_status status = ct_check_least("lr", c->lr, 0.0, err);
    if (status == CT_OK) {
        status = ct_check_beta("beta1", c->beta1, err);
    }
    if (status == CT_OK) {
        status = ct_check_beta("beta2", c->beta2, err);
    }
    if (status == CT_OK) {
        status = ct_check_least("eps", c->eps, 0.0, err);
    }
    if (status == CT_OK) {
        status = ct_check_least("weight_decay", c->weight_decay, 0.0, err);
    }
    return status == CT_OK ? ct_check_least("max_grad_norm", c->max_grad_norm, 0.0, err)
                           : status;
}

ct_status
ct_lamb_coef_init(ct_lamb_coef *coef, const ct_lamb_config *c, uint64_t step,
                  double grad_scale, ct_error *err)
{
    ct_status status = config_check(c, err);
    if (status != CT_OK) {
        return status;
    }
    const double t = (double)step;
    *coef = (ct_lamb_coef){
        .grad_scale = grad_scale,
        .l2 = c->decoupled ? 0.0 : c->weight_decay,
        .beta1 = c->beta1,
        .share = c->grad_averaging ? 1.0 - c->beta1 : 1.0,
        .beta2 = c->beta2,
        .one_minus_beta2 = 1.0 - c->beta2,
        .inv_bias1 = c->bias_correction ? 1.0 / (1.0 - pow(c->beta1, t)) : 1.0,
        .inv_bias2 = c->bias_correction ? 1.0 / sqrt(1.0 - pow(c->beta2, t)) : 1.0,
        .eps = c->eps,
        .weight_decay = c->decoupled ? c->weight_decay : 0.0,
        .lr = c->lr,
        .max_grad_norm = c->max_grad_norm,
        .trusted = c->trust_always || c->weight_decay != 0.0,
    };
    return CT_OK;
}

void
ct_lamb_clip(ct_lamb_coef *coef, double norm)
{
    const double scaled = norm * fabs(coef->grad_scale);
    if (coef->max_grad_norm > 0.0 && scaled > coef->max_grad_norm) {
        coef->grad_scale *= coef->max_grad_norm / scaled;
    }
    coef->max_grad_norm = 0.0;
}

static ct_status
lars_config_check(const ct_lars_config *c, ct_error *err)
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
    ct_status status = lars_config_check(c, err);
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
