#include "core/ct_step.h"

#include <math.h>

double
ct_clip_coef(double max_norm, double norm)
{
    if (max_norm == 0.0 || isinf(max_norm)) {
        return 1.0;
    }
    const double coef = max_norm / (norm + 1e-6);
    return coef > 1.0 ? 1.0 : coef; /* NaN stays */
}

static ct_status
check(const ct_step_config *config, double loss_scale, ct_error *err)
{
    if (!(config->max_norm >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "max_norm must be >= 0, got %g",
                       config->max_norm);
    }
    if (!(loss_scale > 0.0 && isfinite(loss_scale))) {
        return ct_fail(err, CT_EINVAL, "loss_scale must be finite and > 0, got %g",
                       loss_scale);
    }
    return CT_OK;
}

/* Inf or NaN on one rank is one for all. */
static ct_status
agree(const ct_step_config *config, double *norm, bool *finite, ct_error *err)
{
    double sums[] = {*finite ? 0.0 : 1.0, *norm * *norm};
    const ct_span span = {sums, 2, CT_F64};
    ct_status status =
        config->comm->ops->all_reduce(config->comm, &span, CT_REDUCE_SUM, err);
    if (status == CT_OK) {
        *finite = sums[0] == 0.0;
        *norm = config->global_norm ? sqrt(sums[1]) : *norm;
    }
    return status;
}

ct_status
ct_step_measure(ct_optim *optim, void *stream, const ct_step_config *config,
                double loss_scale, ct_step_result *result, ct_error *err)
{
    double norm = 0.0;
    ct_status status = check(config, loss_scale, err);
    if (status == CT_OK) {
        status = ct_optim_norm(optim, stream, &norm, err);
    }
    bool finite = isfinite(norm);
    if (status == CT_OK && config->comm != NULL) {
        status = agree(config, &norm, &finite, err);
    }
    if (status == CT_OK) {
        *result = (ct_step_result){
            .grad_norm = norm / loss_scale,
            .clip_coef = ct_clip_coef(config->max_norm, norm / loss_scale),
            .finite = finite,
        };
    }
    return status;
}

static ct_status
stop(const ct_step_result *result, ct_error *err)
{
    const bool elsewhere = isfinite(result->grad_norm);
    return ct_fail(err, CT_EFLOAT,
                   "the norm of the gradients is %s: a loss or a gradient is not "
                   "finite; try a lower learning rate, or let such steps be "
                   "skipped instead of stopping",
                   elsewhere                  ? "not finite on another rank"
                   : isnan(result->grad_norm) ? "nan"
                                              : "inf");
}

ct_status
ct_step_apply(ct_optim *optim, void *stream, const ct_step_config *config,
              double loss_scale, ct_step_result *result, ct_error *err)
{
    ct_status status = check(config, loss_scale, err);
    if (status != CT_OK) {
        return status;
    }
    const bool keep = result->finite || config->nonfinite == CT_NONFINITE_KEEP;
    if (!keep && config->nonfinite == CT_NONFINITE_STOP) {
        return stop(result, err);
    }
    if (keep) {
        const ct_optim_pass pass = {
            .grad_scale = result->clip_coef / loss_scale,
            .zero_grads = config->zero_grads,
            .ema_decay = config->ema_decay,
        };
        status = ct_optim_update(optim, stream, &pass, err);
    }
    else if (config->zero_grads) {
        status = ct_optim_zero_grads(optim, stream, err);
    }
    if (status == CT_OK) {
        result->updated = keep;
    }
    return status;
}
