#include "core/optim/adagrad.h"

#include "core/optim/hyper.h"

ct_status
ct_adagrad_coef_init(ct_adagrad_coef *coef, const ct_adagrad_config *config,
                     uint64_t step, double grad_scale, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",           config->lr,           0.0, INFINITY},
        {"lr_decay",     config->lr_decay,     0.0, INFINITY},
        {"eps",          config->eps,          0.0, INFINITY},
        {"weight_decay", config->weight_decay, 0.0, INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    if (status == CT_OK) {
        status = ct_hyper_check_step(step, err);
    }
    if (status == CT_OK) {
        *coef = (ct_adagrad_coef){
            .grad_scale = grad_scale,
            .weight_decay = config->weight_decay,
            .step_size = config->lr / (1.0 + (double)(step - 1) * config->lr_decay),
            .eps = config->eps,
        };
    }
    return status;
}
