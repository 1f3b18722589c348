/* SGD's family: hyperparameters, their ranges, and the constants of a step. */
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

/* How much the momentum, a sum of updates, changes with the rate. A last rate of 0
 * leaves nothing to rescale; fairseq then multiplies by the rate, and so does this. */
static double
correction(const ct_nag_config *config)
{
    const double old = isnan(config->lr_old) ? config->lr : config->lr_old;
    return old > 0.0 ? config->lr / old : config->lr;
}

ct_status
ct_nag_coef_init(ct_nag_coef *coef, const ct_nag_config *config, double grad_scale,
                 ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr",           config->lr,           0.0, INFINITY},
        {"momentum",     config->momentum,     0.0, INFINITY},
        {"weight_decay", config->weight_decay, 0.0, INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    if (status == CT_OK) {
        const double carry = config->momentum * correction(config);
        *coef = (ct_nag_coef){
            .grad_scale = grad_scale,
            .decay = 1.0 - config->lr * config->weight_decay,
            .carry = carry,
            .ahead = config->momentum * carry,
            .grad_step = (1.0 + config->momentum) * config->lr,
            .lr = config->lr,
        };
    }
    return status;
}

void
ct_nag_advance(ct_nag_config *config)
{
    config->lr_old = config->lr;
}

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
