#include "core/optim/adadelta.h"

#include "core/optim/hyper.h"

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
