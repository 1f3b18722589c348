/* A rate that falls when a metric stops improving: torch's ReduceLROnPlateau. */
#ifndef CT_PLATEAU_H
#define CT_PLATEAU_H

#include "core/ct_status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What counts as an improvement of a metric over the best one so far. */
typedef struct ct_metric_rule {
    int maximise;     /* is more better? torch's mode */
    int absolute;     /* is the threshold a difference, not a share? threshold_mode */
    double threshold; /* an improvement must be larger than this */
} ct_metric_rule;

/* The metric that every other one improves on: Inf, or -Inf to maximise. */
double ct_metric_worst(const ct_metric_rule *rule);
/* NaN improves on nothing. */
int ct_metric_is_better(const ct_metric_rule *rule, double metric, double best);

typedef struct ct_plateau {
    ct_metric_rule rule;
    double factor;    /* below 1: by which rates are multiplied */
    double eps;       /* a rate that would fall by no more is left as it is */
    int64_t patience; /* evaluations without improvement that are borne */
    int64_t cooldown; /* evaluations after a fall in which none is counted */
    double best;
    int64_t num_bad_epochs;
    int64_t cooldown_counter;
} ct_plateau;

/* torch's defaults; nothing seen. */
ct_plateau ct_plateau_defaults(void);
/* CT_EINVAL names the field at fault. */
CT_NODISCARD ct_status ct_plateau_check(const ct_plateau *plateau, ct_error *err);

/* Takes in one evaluation and changes the n rates where it asks for it; none falls
 * below its entry of least. */
void ct_plateau_step(ct_plateau *plateau, double metric, double *rates,
                     const double *least, size_t n);

#ifdef __cplusplus
}
#endif

#endif
