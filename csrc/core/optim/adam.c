/* Adam's family: hyperparameters, their ranges, and the constants of a step. */
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

static ct_status
ademamix_config_check(const ct_ademamix_config *config, uint64_t step, ct_error *err)
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
    ct_status status = ademamix_config_check(config, step, err);
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
