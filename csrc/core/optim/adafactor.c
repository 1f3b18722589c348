#include "core/optim/adafactor.h"

#include "core/base/check.h"

static ct_status
config_check(const ct_adafactor_config *c, ct_error *err)
{
    ct_status status = c->relative_step ? CT_OK : ct_check_least("lr", c->lr, 0.0, err);
    if (status == CT_OK && c->warmup_init && !c->relative_step) {
        return ct_fail(err, CT_EINVAL, "warmup_init needs relative_step");
    }
    if (status == CT_OK) {
        status = ct_check_least("eps[0]", c->eps, 0.0, err);
    }
    if (status == CT_OK) {
        status = ct_check_least("eps[1]", c->eps2, 0.0, err);
    }
    if (status == CT_OK) {
        status = ct_check_positive("clip_threshold", c->clip_threshold, err);
    }
    if (status == CT_OK && !(c->decay_rate <= 0.0)) {
        return ct_fail(err, CT_EINVAL, "decay_rate must be <= 0, got %g",
                       c->decay_rate);
    }
    if (status == CT_OK && !isnan(c->beta1)) {
        status = ct_check_beta("beta1", c->beta1, err);
    }
    return status == CT_OK ? ct_check_least("weight_decay", c->weight_decay, 0.0, err)
                           : status;
}

static double
rate(const ct_adafactor_config *c, double step)
{
    if (!c->relative_step) {
        return c->lr;
    }
    const double most = c->warmup_init ? 1e-6 * step : 1e-2;
    const double falling = 1.0 / sqrt(step);
    return most < falling ? most : falling;
}

ct_status
ct_adafactor_coef_init(ct_adafactor_coef *coef, const ct_adafactor_config *c,
                       uint64_t step, bool factored, double grad_scale, ct_error *err)
{
    ct_status status = config_check(c, err);
    if (status != CT_OK) {
        return status;
    }
    const double beta2 = 1.0 - pow((double)step, c->decay_rate);
    *coef = (ct_adafactor_coef){
        .grad_scale = grad_scale,
        .beta2 = beta2,
        .one_minus_beta2 = 1.0 - beta2,
        .beta1 = c->beta1,
        .one_minus_beta1 = 1.0 - c->beta1,
        .eps = c->eps,
        .rms_low = c->eps2,
        .clip = c->clip_threshold,
        .lr = rate(c, (double)step),
        .weight_decay = c->weight_decay,
        .scaled = c->scale_parameter,
        .factored = factored,
    };
    return CT_OK;
}
