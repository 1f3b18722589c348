#include "core/ct_adamw.h"

#include <stdbool.h>

/* Each test is written so that NaN fails it. */
static ct_status
config_check(const ct_adamw_config *config, ct_error *err)
{
    if (!(config->lr >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "lr must be >= 0, got %g", config->lr);
    }
    if (!(config->beta1 >= 0.0 && config->beta1 < 1.0)) {
        return ct_fail(err, CT_EINVAL, "beta1 must be in [0, 1), got %g",
                       config->beta1);
    }
    if (!(config->beta2 >= 0.0 && config->beta2 < 1.0)) {
        return ct_fail(err, CT_EINVAL, "beta2 must be in [0, 1), got %g",
                       config->beta2);
    }
    if (!(config->eps >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "eps must be >= 0, got %g", config->eps);
    }
    if (!(config->weight_decay >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "weight_decay must be >= 0, got %g",
                       config->weight_decay);
    }
    return CT_OK;
}

ct_status
ct_adamw_coef_init(ct_adamw_coef *coef, const ct_adamw_config *config, uint64_t step,
                   double grad_scale, ct_error *err)
{
    ct_status status = config_check(config, err);
    if (status != CT_OK) {
        return status;
    }
    if (step < 1) {
        return ct_fail(err, CT_EINVAL, "step counts from 1, got 0");
    }
    const bool from_grad = config->beta1 <= 0.5;
    *coef = (ct_adamw_coef){
        .grad_scale = grad_scale,
        .decay = 1.0 - config->lr * config->weight_decay,
        .lerp = from_grad ? -config->beta1 : 1.0 - config->beta1,
        .beta2 = config->beta2,
        .one_minus_beta2 = 1.0 - config->beta2,
        .step_size = config->lr / (1.0 - pow(config->beta1, (double)step)),
        .inv_bias2 = 1.0 / sqrt(1.0 - pow(config->beta2, (double)step)),
        .eps = config->eps,
        .from_grad = from_grad,
    };
    return CT_OK;
}
