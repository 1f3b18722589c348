#include "core/optim/nadam.h"

#include "core/optim/hyper.h"

double
ct_nadam_momentum(const ct_nadam_config *config, uint64_t step)
{
    const double part = pow(0.96, (double)step * config->momentum_decay);
    return config->beta1 * (1.0 - 0.5 * part);
}

ct_status
ct_nadam_coef_init(ct_nadam_coef *coef, const ct_nadam_config *config, uint64_t step,
                   double grad_scale, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",             config->lr,             0.0, INFINITY},
        {"beta1",          config->beta1,          0.0, 1.0     },
        {"beta2",          config->beta2,          0.0, 1.0     },
        {"eps",            config->eps,            0.0, INFINITY},
        {"weight_decay",   config->weight_decay,   0.0, INFINITY},
        {"momentum_decay", config->momentum_decay, 0.0, INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    if (status == CT_OK) {
        status = ct_hyper_check_step(step, err);
    }
    if (status == CT_OK) {
        *coef = (ct_nadam_coef){
            .grad_scale = grad_scale,
            .decay = config->decoupled ? 1.0 - config->lr * config->weight_decay : 1.0,
            .weight_decay = config->decoupled ? 0.0 : config->weight_decay,
            .lerp = ct_average_weight(config->beta1),
            .from_grad = ct_average_from_new(config->beta1),
            .beta2 = config->beta2,
            .one_minus_beta2 = 1.0 - config->beta2,
            .inv_bias2 = 1.0 / sqrt(ct_hyper_bias(config->beta2, step)),
            .eps = config->eps,
        };
    }
    return status;
}

void
ct_nadam_coef_complete(ct_nadam_coef *coef, const ct_nadam_config *config,
                       uint64_t step, double product)
{
    const double now = ct_nadam_momentum(config, step);
    const double next = ct_nadam_momentum(config, step + 1);
    coef->grad_step = config->lr * (1.0 - now) / (1.0 - product);
    coef->moment_step = config->lr * next / (1.0 - product * next);
}
