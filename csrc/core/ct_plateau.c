#include "core/ct_plateau.h"

#include <inttypes.h>
#include <math.h>

double
ct_metric_worst(const ct_metric_rule *rule)
{
    return rule->maximise ? -(double)INFINITY : (double)INFINITY;
}

int
ct_metric_is_better(const ct_metric_rule *rule, double metric, double best)
{
    const double t = rule->threshold;
    if (rule->maximise) {
        return metric > (rule->absolute ? best + t : best * (1.0 + t));
    }
    return metric < (rule->absolute ? best - t : best * (1.0 - t));
}

ct_plateau
ct_plateau_defaults(void)
{
    ct_plateau p = {
        .rule = {.threshold = 1e-4}, .factor = 0.1, .eps = 1e-8, .patience = 10};
    p.best = ct_metric_worst(&p.rule);
    return p;
}

ct_status
ct_plateau_check(const ct_plateau *p, ct_error *err)
{
    if (!(p->factor < 1.0 && p->factor >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "factor must be from 0 to below 1, got %g",
                       p->factor);
    }
    if (!isfinite(p->rule.threshold)) {
        return ct_fail(err, CT_EINVAL, "threshold must be finite, got %g",
                       p->rule.threshold);
    }
    if (!(p->eps >= 0.0)) {
        return ct_fail(err, CT_EINVAL, "eps must be >= 0, got %g", p->eps);
    }
    if (p->patience < 0) {
        return ct_fail(err, CT_EINVAL, "patience must be >= 0, got %" PRId64,
                       p->patience);
    }
    if (p->cooldown < 0) {
        return ct_fail(err, CT_EINVAL, "cooldown must be >= 0, got %" PRId64,
                       p->cooldown);
    }
    return CT_OK;
}

static void
lower(const ct_plateau *p, double *rates, const double *least, size_t n)
{
    for (size_t g = 0; g < n; g++) {
        double rate = rates[g] * p->factor;
        rate = least[g] > rate ? least[g] : rate;
        if (rates[g] - rate > p->eps) {
            rates[g] = rate;
        }
    }
}

void
ct_plateau_step(ct_plateau *p, double metric, double *rates, const double *least,
                size_t n)
{
    if (ct_metric_is_better(&p->rule, metric, p->best)) {
        p->best = metric;
        p->num_bad_epochs = 0;
    }
    else {
        p->num_bad_epochs++;
    }
    if (p->cooldown_counter > 0) {
        p->cooldown_counter--;
        p->num_bad_epochs = 0;
    }
    if (p->num_bad_epochs > p->patience) {
        lower(p, rates, least, n);
        p->cooldown_counter = p->cooldown;
        p->num_bad_epochs = 0;
    }
}
