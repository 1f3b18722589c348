/* Adagrad's family: hyperparameters, their ranges, and the constants of a step. */
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

ct_status
ct_adadelta_coef_init(ct_adadelta_coef *coef, const ct_adadelta_config *config,
                      double grad_scale, ct_error *err)
{
    const ct_hyper numbers[] = {
        {"lr", config->lr, 0.0, INFINITY},
        {"rho", config->rho, 0.0, nextafter(1.0, 2.0)}, /* torch allows 1 */
        {"eps", config->eps, 0.0, INFINITY},
        {"weight_decay", config->weight_decay, 0.0, INFINITY},
    };
    ct_status status = ct_hyper_check(numbers, sizeof numbers / sizeof *numbers, err);
    if (status == CT_OK) {
        *coef = (ct_adadelta_coef){
            .grad_scale = grad_scale,
            .lr = config->lr,
            .weight_decay = config->weight_decay,
            .rho = config->rho,
            .one_minus_rho = 1.0 - config->rho,
            .eps = config->eps,
        };
    }
    return status;
}

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
