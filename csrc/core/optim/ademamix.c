#include "core/optim/ademamix.h"

#include "core/optim/hyper.h"

static ct_status
config_check(const ct_ademamix_config *config, uint64_t step, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",           config->lr,                                     0.0, INFINITY},
        {"beta1",        config->beta1,                                  0.0, 1.0     },
        {"beta2",        config->beta2,                                  0.0, 1.0     },
        {"beta3",        config->beta3,                                  0.0, 1.0     },
        {"alpha",        config->alpha,                                  0.0, INFINITY},
        {"t_alpha",      isnan(config->t_alpha) ? 0.0 : config->t_alpha, 0.0, INFINITY},
        {"t_beta3",      isnan(config->t_beta3) ? 0.0 : config->t_beta3, 0.0, INFINITY},
        {"eps",          config->eps,                                    0.0, INFINITY},
        {"weight_decay", config->weight_decay,                           0.0, INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    return status == CT_OK ? ct_hyper_check_step(step, err) : status;
}

/* How much of a warm-up over `updates` is done: 1 without one. */
static double
done(double updates, uint64_t step)
{
    return (double)step < updates ? (double)step / updates : 1.0;
}

/* beta3 so that the half-life of the slow average, log(1/2) / log(beta), grows linearly
 * from that of beta1. */
static double
slow_beta(const ct_ademamix_config *config, uint64_t step)
{
    const double part = done(config->t_beta3, step);
    if (part == 1.0) {
        return config->beta3;
    }
    const double first = 1.0 / log(config->beta1), last = 1.0 / log(config->beta3);
    return exp(1.0 / ((1.0 - part) * first + part * last));
}

ct_status
ct_ademamix_coef_init(ct_ademamix_coef *coef, const ct_ademamix_config *config,
                      uint64_t step, double grad_scale, ct_error *err)
{
    ct_status status = config_check(config, step, err);
    if (status != CT_OK) {
        return status;
    }
    const double beta3 = slow_beta(config, step);
    *coef = (ct_ademamix_coef){
        .grad_scale = grad_scale,
        .decay = 1.0 - config->lr * config->weight_decay,
        .lr = config->lr,
        .fast = ct_average_weight(config->beta1),
        .fast_from_grad = ct_average_from_new(config->beta1),
        .slow = ct_average_weight(beta3),
        .slow_from_grad = ct_average_from_new(beta3),
        .beta2 = config->beta2,
        .one_minus_beta2 = 1.0 - config->beta2,
        .inv_bias1 = 1.0 / ct_hyper_bias(config->beta1, step),
        .inv_bias2 = 1.0 / sqrt(ct_hyper_bias(config->beta2, step)),
        .alpha = config->alpha * done(config->t_alpha, step),
        .eps = config->eps,
    };
    return CT_OK;
}
