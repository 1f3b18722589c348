#include "core/optim/lion.h"

#include "core/optim/hyper.h"

ct_status
ct_lion_coef_init(ct_lion_coef *coef, const ct_lion_config *config, double grad_scale,
                  ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",           config->lr,           0.0, INFINITY},
        {"beta1",        config->beta1,        0.0, 1.0     },
        {"beta2",        config->beta2,        0.0, 1.0     },
        {"weight_decay", config->weight_decay, 0.0, INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    if (status == CT_OK) {
        *coef = (ct_lion_coef){
            .grad_scale = grad_scale,
            .lr = config->lr,
            .decay = 1.0 - config->lr * config->weight_decay,
            .beta1 = config->beta1,
            .one_minus_beta1 = 1.0 - config->beta1,
            .beta2 = config->beta2,
            .one_minus_beta2 = 1.0 - config->beta2,
        };
    }
    return status;
}
