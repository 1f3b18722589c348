#include "core/optim/adam.h"

#include "core/optim/hyper.h"

static ct_status
config_check(const ct_adamw_config *config, uint64_t step, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",           config->lr,           0.0, INFINITY},
        {"beta1",        config->beta1,        0.0, 1.0     },
        {"beta2",        config->beta2,        0.0, 1.0     },
        {"eps",          config->eps,          0.0, INFINITY},
        {"weight_decay", config->weight_decay, 0.0, INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    return status == CT_OK ? ct_hyper_check_step(step, err) : status;
}

ct_status
ct_adamw_coef_init(ct_adamw_coef *coef, const ct_adamw_config *config, uint64_t step,
                   double grad_scale, ct_error *err)
{
    ct_status status = config_check(config, step, err);
    if (status == CT_OK) {
        *coef = (ct_adamw_coef){
            .grad_scale = grad_scale,
            .decay = config->decoupled ? 1.0 - config->lr * config->weight_decay : 1.0,
            .weight_decay = config->decoupled ? 0.0 : config->weight_decay,
            .lerp = ct_average_weight(config->beta1),
            .from_grad = ct_average_from_new(config->beta1),
            .beta2 = config->beta2,
            .one_minus_beta2 = 1.0 - config->beta2,
            .step_size = config->lr / ct_hyper_bias(config->beta1, step),
            .inv_bias2 = 1.0 / sqrt(ct_hyper_bias(config->beta2, step)),
            .eps = config->eps,
        };
    }
    return status;
}

ct_status
ct_fairseq_adam_coef_init(ct_adamw_coef *coef, const ct_adamw_config *config,
                          uint64_t step, double grad_scale, ct_error *err)
{
    ct_adamw_config decoupled = *config;
    decoupled.decoupled = true;
    ct_status status = ct_adamw_coef_init(coef, &decoupled, step, grad_scale, err);
    if (status == CT_OK) {
        coef->step_size *= sqrt(ct_hyper_bias(config->beta2, step));
        coef->inv_bias2 = 1.0;
    }
    return status;
}

double
ct_radam_rectification(double beta2, uint64_t step, double tractable)
{
    const double most = 2.0 / (1.0 - beta2) - 1.0; /* of the length of the average */
    const double length = most - 2.0 * (double)step * pow(beta2, (double)step) /
                                     ct_hyper_bias(beta2, step);
    return length > tractable ? sqrt((length - 4.0) * (length - 2.0) * most /
                                     ((most - 4.0) * (most - 2.0) * length))
                              : 0.0;
}

ct_status
ct_radam_coef_init(ct_adamw_coef *coef, const ct_adamw_config *config, uint64_t step,
                   double grad_scale, ct_error *err)
{
    ct_status status = ct_adamw_coef_init(coef, config, step, grad_scale, err);
    if (status != CT_OK) {
        return status;
    }
    const double rectified = ct_radam_rectification(config->beta2, step, 5.0);
    if (rectified != 0.0) {
        coef->step_size *= rectified * sqrt(ct_hyper_bias(config->beta2, step));
        coef->inv_bias2 = 1.0;
    }
    else { /* the denominator becomes 1: momentum alone */
        coef->inv_bias2 = 0.0;
        coef->eps = 1.0;
    }
    return CT_OK;
}
