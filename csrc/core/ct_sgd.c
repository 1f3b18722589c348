#include "core/ct_sgd.h"

/* Each test is written so that NaN fails it. */
static ct_status
config_check(const ct_sgd_config *config, ct_error *err)
{
    if (!(config->lr >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "lr must be >= 0, got %g", config->lr);
    }
    if (!(config->momentum >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "momentum must be >= 0, got %g",
                       config->momentum);
    }
    if (config->dampening != config->dampening) {
        return ct_fail(err, CT_EINVAL, "dampening must be a number, got nan");
    }
    if (!(config->weight_decay >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "weight_decay must be >= 0, got %g",
                       config->weight_decay);
    }
    if (config->nesterov && (config->momentum == 0.0 || config->dampening != 0.0)) {
        return ct_fail(err, CT_EINVAL,
                       "nesterov needs momentum > 0 and dampening 0, got momentum=%g "
                       "and dampening=%g",
                       config->momentum, config->dampening);
    }
    return CT_OK;
}

ct_status
ct_sgd_coef_init(ct_sgd_coef *coef, const ct_sgd_config *config, bool first,
                 double grad_scale, ct_error *err)
{
    ct_status status = config_check(config, err);
    if (status != CT_OK) {
        return status;
    }
    *coef = (ct_sgd_coef){
        .grad_scale = grad_scale,
        .lr = config->lr,
        .momentum = config->momentum,
        .one_minus_dampening = 1.0 - config->dampening,
        .weight_decay = config->weight_decay,
        .nesterov = config->nesterov,
        .first = first,
    };
    return CT_OK;
}
