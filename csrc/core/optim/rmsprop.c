#include "core/optim/rmsprop.h"

#include "core/optim/hyper.h"

ct_status
ct_rmsprop_coef_init(ct_rmsprop_coef *coef, const ct_rmsprop_config *config,
                     double grad_scale, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",           config->lr,           0.0, INFINITY},
        {"alpha",        config->alpha,        0.0, INFINITY},
        {"eps",          config->eps,          0.0, INFINITY},
        {"weight_decay", config->weight_decay, 0.0, INFINITY},
        {"momentum",     config->momentum,     0.0, INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    if (status == CT_OK) {
        *coef = (ct_rmsprop_coef){
            .grad_scale = grad_scale,
            .lr = config->lr,
            .weight_decay = config->weight_decay,
            .alpha = config->alpha,
            .one_minus_alpha = 1.0 - config->alpha,
            .lerp = ct_average_weight(config->alpha),
            .from_grad = ct_average_from_new(config->alpha),
            .momentum = config->momentum,
            .eps = config->eps,
        };
    }
    return status;
}
