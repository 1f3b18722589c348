/* A rate that rises while a metric improves and falls when it does not.
 *
 * Source: "GreedyLR: A Novel Adaptive Learning Rate Scheduler", arXiv 2512.14527, in
 * the form of transformers 5.17. */
#ifndef CT_GREEDY_H
#define CT_GREEDY_H

#include "core/ct_plateau.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The mean of the last `size` metrics. The sum is carried on, as the original does. */
typedef struct ct_window {
    double *values; /* owned ring of `size` */
    int64_t size;
    int64_t count; /* metrics in it */
    int64_t next;  /* where the next one goes */
    double sum;
} ct_window;

/* CT_EINVAL: size is below 1; CT_ENOMEM. The old values are released. */
CT_NODISCARD ct_status ct_window_init(ct_window *window, int64_t size, ct_error *err);
void ct_window_fini(ct_window *window);
/* The i-th oldest value. */
double ct_window_at(const ct_window *window, int64_t i);
double ct_window_mean(ct_window *window, double metric);

typedef struct ct_greedy {
    ct_metric_rule rule;
    double factor;    /* above 0 and below 1: rates are multiplied or divided by it */
    double eps;       /* a rate that would change by no more is left as it is */
    int64_t patience; /* evaluations of one sort that are borne */
    int64_t cooldown; /* evaluations after a fall in which none is counted */
    int64_t warmup;   /* evaluations after a rise in which none is counted */
    int64_t reset_start_original; /* falls at the least rate before a new start */
    int smooth;                   /* judge the window's mean instead of the metric */
    double best;
    int64_t num_bad_epochs, num_good_epochs;
    int64_t cooldown_counter, warmup_counter;
    int64_t reset_start; /* what is left of reset_start_original */
    ct_window window;    /* in use if smooth */
} ct_greedy;

/* One number for each group of parameters. */
typedef struct ct_greedy_rates {
    double *now;
    const double *least, *most, *initial;
    size_t n;
} ct_greedy_rates;

/* transformers' defaults; nothing seen, no window yet. */
ct_greedy ct_greedy_defaults(void);
/* CT_EINVAL names the field at fault. */
CT_NODISCARD ct_status ct_greedy_check(const ct_greedy *greedy, ct_error *err);

/* Takes in one evaluation and changes rates->now where it asks for it. Returns 1 if it
 * has started anew from the initial rates. */
int ct_greedy_step(ct_greedy *greedy, double metric, const ct_greedy_rates *rates);

#ifdef __cplusplus
}
#endif

#endif
