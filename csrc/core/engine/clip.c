/* The factors that clip, from the sums of a pass over all gradients.
 *
 * Sums of |g|^p are merged in the order of groups, in double: the same factor on every
 * instruction set. NaN is never clamped away: `coef > 1` is false for NaN. */
#include "core/engine/clip.h"

#include "math/norm.h"

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

double
ct_clip_coef(double max_norm, double norm)
{
    if (max_norm == 0.0 || isinf(max_norm)) {
        return 1.0;
    }
    const double coef = max_norm / (norm + 1e-6);
    return coef > 1.0 ? 1.0 : coef; /* NaN stays */
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

double
ct_clip_norm(const ct_clip *clip, double sum)
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
    return ct_clip_norm(clip, sum);
}

double
ct_clip_decide(const ct_clip *clip, ct_grads *grads, double loss_scale)
{
    const double norm = ct_clip_norm(clip, *ct_grads_total(grads));
    const double together =
        ct_clip_by_group(clip, grads) ? norm_together(clip, grads) : norm;
    const double shared = ct_clip_coef(clip->max_norm, together / loss_scale);
    for (size_t g = 0; g < grads->n_groups; g++) {
        ct_grad_group *group = &grads->groups[g];
        const double most = group->max_norm != 0.0 ? group->max_norm : clip->max_norm;
        group->coef =
            alone(clip, group)
                ? ct_clip_coef(most, ct_clip_norm(clip, grads->sums[g]) / loss_scale)
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
