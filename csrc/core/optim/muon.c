#include "core/optim/muon.h"

#include "core/base/check.h"

static ct_status
config_check(const ct_muon_config *c, ct_error *err)
{
    ct_status status = ct_check_least("lr", c->lr, 0.0, err);
    if (status == CT_OK) {
        status = ct_check_least("weight_decay", c->weight_decay, 0.0, err);
    }
    if (status == CT_OK && !(c->momentum >= 0.0 && c->momentum <= 1.0)) {
        return ct_fail(err, CT_EINVAL, "momentum must be in [0, 1], got %g",
                       c->momentum);
    }
    for (int i = 0; status == CT_OK && i < 3; i++) {
        if (!isfinite(c->coefficients[i])) {
            return ct_fail(err, CT_EINVAL, "ns_coefficients[%d] must be finite, got %g",
                           i, c->coefficients[i]);
        }
    }
    if (status == CT_OK) {
        status = ct_check_positive("eps", c->eps, err);
    }
    if (status == CT_OK &&
        !(c->steps >= 0.0 && c->steps < 100.0 && floor(c->steps) == c->steps)) {
        return ct_fail(err, CT_EINVAL,
                       "ns_steps must be a whole number in [0, 100), got %g", c->steps);
    }
    return status;
}

ct_status
ct_muon_coef_init(ct_muon_coef *coef, const ct_muon_config *c, double grad_scale,
                  ct_error *err)
{
    ct_status status = config_check(c, err);
    if (status != CT_OK) {
        return status;
    }
    *coef = (ct_muon_coef){
        .grad_scale = grad_scale,
        .momentum = c->momentum,
        .one_minus_momentum = 1.0 - c->momentum,
        .eps = c->eps,
        .nesterov = c->nesterov,
        .from_grad = c->momentum < 0.5,
        .lr = c->lr,
        .weight_decay = c->weight_decay,
        .a = c->coefficients[0],
        .b = c->coefficients[1],
        .c = c->coefficients[2],
        .n_steps = (int)c->steps,
        .adjust = (int)c->adjust,
    };
    return CT_OK;
}

double
ct_muon_rate_factor(ct_muon_adjust adjust, size_t rows, size_t cols)
{
    const double m = (double)rows, n = (double)cols;
    if (adjust == CT_MUON_MATCH_RMS_ADAMW) {
        return 0.2 * sqrt(m > n ? m : n);
    }
    return m > n ? sqrt(m / n) : 1.0;
}
