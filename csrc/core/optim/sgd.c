#include "core/optim/sgd.h"

#include "core/optim/hyper.h"

static ct_status
config_check(const ct_sgd_config *config, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",           config->lr,           0.0,       INFINITY},
        {"momentum",     config->momentum,     0.0,       INFINITY},
        {"dampening",    config->dampening,    -INFINITY, INFINITY},
        {"weight_decay", config->weight_decay, 0.0,       INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    if (status != CT_OK) {
        return status;
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
