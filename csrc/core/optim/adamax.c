#include "core/optim/adamax.h"

#include "core/optim/hyper.h"

/* What the two forms share. */
static ct_status
common_init(ct_adamax_coef *coef, const ct_adamax_config *config, uint64_t step,
            double grad_scale, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",           config->lr,           0.0, INFINITY},
        {"beta1",        config->beta1,        0.0, 1.0     },
        {"beta2",        config->beta2,        0.0, 1.0     },
        {"eps",          config->eps,          0.0, INFINITY},
        {"weight_decay", config->weight_decay, 0.0, INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    if (status == CT_OK) {
        status = ct_hyper_check_step(step, err);
    }
    if (status == CT_OK) {
        *coef = (ct_adamax_coef){
            .grad_scale = grad_scale,
            .decay = 1.0,
            .lerp = ct_average_weight(config->beta1),
            .from_grad = ct_average_from_new(config->beta1),
            .beta2 = config->beta2,
            .step_size = config->lr / ct_hyper_bias(config->beta1, step),
        };
    }
    return status;
}

ct_status
ct_adamax_coef_init(ct_adamax_coef *coef, const ct_adamax_config *config, uint64_t step,
                    double grad_scale, ct_error *err)
{
    ct_status status = common_init(coef, config, step, grad_scale, err);
    if (status == CT_OK) {
        coef->weight_decay = config->weight_decay;
        coef->grad_eps = config->eps;
    }
    return status;
}

ct_status
ct_fairseq_adamax_coef_init(ct_adamax_coef *coef, const ct_adamax_config *config,
                            uint64_t step, double grad_scale, ct_error *err)
{
    ct_status status = common_init(coef, config, step, grad_scale, err);
    if (status == CT_OK) {
        coef->decay = 1.0 - config->lr * config->weight_decay;
        coef->norm_eps = config->eps;
        if (!config->bias_correction) {
            coef->step_size = config->lr;
        }
    }
    return status;
}
