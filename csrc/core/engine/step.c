/* One update: measure on all ranks, then apply on all or none.
 *
 * No weight is written before every rank knows the norm and that all gradients are
 * finite; a rank that fails while it measures still joins the collective. */
#include "core/engine/step.h"

#include "core/comm/collectives.h"
#include "math/norm.h"

#include <math.h>
#include <string.h>

/* ---- clipping -------------------------------------------------------------------- */

/* Sums of |g|^p are merged in the order of groups, in double: the same factor on every
 * instruction set. NaN is never clamped away: `coef > 1` is false for NaN. */
ct_status
ct_clip_check(const ct_clip *clip, ct_error *err)
{
    const struct {
        const char *name;
        double value;
    } fields[] = {
        {"max_norm",   clip->max_norm },
        {"norm_type",  clip->norm_type},
        {"clip_value", clip->value    },
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (!(fields[i].value >= 0.0)) {
            return ct_fail(err, CT_EINVAL, "%s must be >= 0, got %g", fields[i].name,
                           fields[i].value);
        }
    }
    return CT_OK;
}

static double
norm_type(const ct_clip *clip)
{
    return clip->norm_type == 0.0 ? 2.0 : clip->norm_type;
}

bool
ct_clip_by_value(const ct_clip *clip)
{
    return clip->value > 0.0 && !isinf(clip->value);
}

static bool
alone(const ct_clip *clip, const ct_grad_group *group)
{
    return clip->by_group || group->max_norm != 0.0;
}

bool
ct_clip_by_group(const ct_clip *clip, const ct_grads *grads)
{
    bool found = false;
    for (size_t g = 0; g < grads->n_groups; g++) {
        found = found || alone(clip, &grads->groups[g]);
    }
    return found;
}

ct_status
ct_clip_measure(const ct_clip *clip, ct_grads *grads, void *stream, ct_error *err)
{
    return ct_grads_sum(grads, stream, norm_type(clip), ct_clip_by_group(clip, grads),
                        err);
}

/* The norm that a sum in grads->sums is of. */
static double
clip_norm(const ct_clip *clip, double sum)
{
    return ct_norm_root(norm_type(clip), sum);
}

/* The common norm of the groups without a norm of their own. */
static double
norm_together(const ct_clip *clip, const ct_grads *grads)
{
    const ct_norm_kind kind = ct_norm_kind_of(norm_type(clip));
    double sum = 0.0;
    for (size_t g = 0; g < grads->n_groups; g++) {
        if (!alone(clip, &grads->groups[g])) {
            sum = ct_norm_merge(kind, sum, grads->sums[g]);
        }
    }
    return clip_norm(clip, sum);
}

double
ct_clip_decide(const ct_clip *clip, ct_grads *grads, double loss_scale)
{
    const double norm = clip_norm(clip, *ct_grads_total(grads));
    const double together =
        ct_clip_by_group(clip, grads) ? norm_together(clip, grads) : norm;
    const double shared = ct_clip_coef(clip->max_norm, together / loss_scale);
    for (size_t g = 0; g < grads->n_groups; g++) {
        ct_grad_group *group = &grads->groups[g];
        const double most = group->max_norm != 0.0 ? group->max_norm : clip->max_norm;
        group->coef =
            alone(clip, group)
                ? ct_clip_coef(most, clip_norm(clip, grads->sums[g]) / loss_scale)
                : shared;
    }
    return norm / loss_scale;
}

double
ct_clip_least(const ct_grads *grads)
{
    double least = 1.0;
    for (size_t g = 0; g < grads->n_groups; g++) {
        const double coef = grads->groups[g].coef;
        least = !(coef >= least) && !isnan(least) ? coef : least;
    }
    return least;
}

ct_status
ct_clip_apply(const ct_clip *clip, ct_grads *grads, void *stream, double loss_scale,
              ct_error *err)
{
    const double limit = ct_clip_by_value(clip) ? clip->value : (double)INFINITY;
    return ct_grads_scale(grads, stream, 1.0 / loss_scale, limit, err);
}

/* ---- measuring ------------------------------------------------------------------- */

/* Added to the count of ranks with bad gradients by a rank that could not measure: more
 * than any number of ranks. */
static const double NOT_MEASURED = 0x1p40;

static ct_status
check(const ct_step_config *config, double loss_scale, ct_error *err)
{
    if (!(loss_scale > 0.0 && isfinite(loss_scale))) {
        return ct_fail(err, CT_EINVAL, "loss_scale must be finite and > 0, got %g",
                       loss_scale);
    }
    return ct_clip_check(&config->clip, err);
}

/* Inf or NaN on one rank counts for all; global_norm adds up the ranks' sums. A rank
 * that failed before, with the status `own`, joins all the same, or the others would
 * wait until their time-out. */
static ct_status
agree(const ct_step_config *config, ct_grads *grads, ct_status own, bool *finite,
      ct_error *err)
{
    double *bad = ct_grads_total(grads) + 1, *from = bad;
    const ct_reduce_op op =
        isinf(config->clip.norm_type) ? CT_REDUCE_MAX : CT_REDUCE_SUM;
    if (config->global_norm) {
        from = ct_clip_by_group(&config->clip, grads) ? grads->sums : bad - 1;
    }
    if (own != CT_OK) {
        memset(grads->sums, 0, (grads->n_groups + 1) * sizeof *grads->sums);
    }
    *bad = own != CT_OK ? NOT_MEASURED : *finite ? 0.0 : 1.0;
    ct_status status = ct_comm_reduce_numbers(
        config->comm, from, (size_t)(bad - from) + 1, op, own == CT_OK ? err : NULL);
    *finite = *bad == 0.0;
    if (own != CT_OK) {
        return own;
    }
    return status == CT_OK && *bad >= NOT_MEASURED
               ? ct_fail(err, CT_ECOMM,
                         "the gradients could not be measured on another rank, which "
                         "reports why: none of the ranks updates")
               : status;
}

ct_status
ct_step_measure(ct_optim *optim, void *stream, const ct_step_config *config,
                double loss_scale, ct_step_result *result, ct_error *err)
{
    ct_grads *grads = NULL;
    bool finite = true;
    ct_status status = ct_optim_grads(optim, &grads, err);
    if (status == CT_OK) {
        status = check(config, loss_scale, err);
    }
    if (status == CT_OK) {
        status = ct_clip_measure(&config->clip, grads, stream, err);
    }
    if (status == CT_OK) {
        finite = isfinite(clip_norm(&config->clip, *ct_grads_total(grads)));
    }
    if (config->comm != NULL) {
        status = agree(config, grads, status, &finite, err);
    }
    if (status == CT_OK) {
        const double norm = ct_clip_decide(&config->clip, grads, loss_scale);
        *result = (ct_step_result){
            .grad_norm = norm,
            .clip_coef = ct_clip_least(grads),
            .finite = finite,
        };
    }
    return status;
}

/* ---- spikes ---------------------------------------------------------------------- */

bool
ct_step_is_spike(const double *norms, size_t n, double norm, double sigmas)
{
    double sum = 0.0, squares = 0.0;
    if (n < CT_SPIKE_LEAST) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        sum += norms[i];
    }
    const double mean = sum / (double)n;
    for (size_t i = 0; i < n; i++) {
        squares += (norms[i] - mean) * (norms[i] - mean);
    }
    return norm - mean > sigmas * sqrt(squares / (double)(n - 1));
}

/* ---- applying -------------------------------------------------------------------- */

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

/* Clips by value in place: the update's pass only multiplies, and has no limit. */
static ct_status
clip_in_place(ct_optim *optim, void *stream, const ct_step_config *config,
              double loss_scale, ct_optim_pass *pass, ct_error *err)
{
    ct_grads *grads;
    if (!ct_clip_by_value(&config->clip)) {
        return CT_OK;
    }
    ct_status status = ct_optim_grads(optim, &grads, err);
    for (size_t g = 0; status == CT_OK && !pass->clip && g < grads->n_groups; g++) {
        grads->groups[g].coef = 1.0;
    }
    if (status == CT_OK) {
        status = ct_clip_apply(&config->clip, grads, stream, loss_scale, err);
    }
    pass->clip = false;
    pass->grad_scale = 1.0;
    return status;
}

ct_status
ct_step_apply(ct_optim *optim, void *stream, const ct_step_config *config,
              double loss_scale, ct_step_result *result, ct_error *err)
{
    ct_status status = check(config, loss_scale, err);
    if (status != CT_OK) {
        return status;
    }
    const bool usable = result->finite || config->nonfinite == CT_NONFINITE_KEEP;
    const bool keep = usable && !result->spike;
    if (!usable && config->nonfinite == CT_NONFINITE_STOP) {
        return stop(result, err);
    }
    if (keep) {
        ct_optim_pass pass = {
            .grad_scale = 1.0 / loss_scale,
            .clip = result->clip_coef != 1.0,
            .zero_grads = config->zero_grads,
            .ema_decay = config->ema_decay,
            .capture = config->capture,
        };
        status = clip_in_place(optim, stream, config, loss_scale, &pass, err);
        if (status == CT_OK) {
            status = ct_optim_update(optim, stream, &pass, err);
        }
    }
    else if (config->zero_grads) {
        status = ct_optim_zero_grads(optim, stream, err);
    }
    if (status == CT_OK) {
        result->updated = keep;
    }
    return status;
}

/* ---- without a wait -------------------------------------------------------------- */

bool
ct_step_can_enqueue(const ct_optim *optim, const ct_step_config *config)
{
    const ct_norm_kind kind = ct_norm_kind_of(norm_type(&config->clip));
    const bool exact_root =
        kind == CT_NORM_ONE || kind == CT_NORM_TWO || kind == CT_NORM_MAX;
    /* A sum of powers can be added up over ranks; NCCL's largest number is not NaN. */
    const bool can_agree =
        config->comm == NULL || (config->comm->ops->takes_device_memory &&
                                 !(config->global_norm && kind == CT_NORM_MAX));
    /* An update that the device skips leaves the gradients alone, too. */
    const bool zeroes = config->zero_grads && config->nonfinite != CT_NONFINITE_KEEP;
    return can_agree && config->nonfinite != CT_NONFINITE_STOP && !zeroes &&
           exact_root && !config->clip.by_group && !ct_clip_by_value(&config->clip) &&
           ct_optim_can_defer(optim);
}

ct_status
ct_step_enqueue(ct_optim *optim, void *stream, const ct_step_config *config,
                const ct_step_scale *scale, ct_error *err)
{
    const ct_clip_request request = {
        .norm_type = norm_type(&config->clip),
        .max_norm = config->clip.max_norm,
        .loss_scale = scale->now,
        .keep = config->nonfinite == CT_NONFINITE_KEEP,
        .next_scale = scale->next,
        .clean = (float)scale->clean,
        .overflow = (float)scale->overflow,
    };
    ct_optim_pass pass = {
        .grad_scale = 1.0 / scale->now,
        .zero_grads = config->zero_grads,
        .ema_decay = config->ema_decay,
        .capture = config->capture,
    };
    ct_status status = check(config, scale->now, err);
    if (status == CT_OK) {
        const ct_optim_ranks ranks = {config->comm, config->global_norm};
        status = ct_optim_clip(optim, stream, &request, &ranks, &pass.outcome, err);
    }
    return status == CT_OK ? ct_optim_update(optim, stream, &pass, err) : status;
}

ct_status
ct_step_await(ct_optim *optim, ct_step_result *result, ct_error *err)
{
    ct_clip_outcome outcome;
    ct_status status = ct_optim_await(optim, &outcome, err);
    if (status == CT_OK) {
        *result = (ct_step_result){
            .grad_norm = outcome.grad_norm,
            .clip_coef = outcome.coef,
            .finite = outcome.finite != 0,
            .updated = !outcome.skip,
        };
    }
    return status;
}

ct_status
ct_step_prepare_replay(ct_optim *optim, void *stream, const ct_step_config *config,
                       double loss_scale, ct_error *err)
{
    const ct_optim_pass pass = {
        .grad_scale = 1.0 / loss_scale,
        .ema_decay = config->ema_decay,
    };
    return ct_optim_prepare_replay(optim, stream, &pass, err);
}
