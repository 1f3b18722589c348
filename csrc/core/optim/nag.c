#include "core/optim/nag.h"

#include "core/optim/hyper.h"

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
