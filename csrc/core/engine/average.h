/* Averages of a model's weights over updates: when an average is due, and how much of
 * the old average the new one keeps.
 *
 * Sources: exponential averages with fairseq's options (ema_decay, ema_start_update,
 * ema_update_freq); equal averages by Izmailov et al., "Averaging Weights Leads to
 * Wider Optima and Better Generalization", 2018. */
#ifndef CT_AVERAGE_H
#define CT_AVERAGE_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum ct_average_kind {
    CT_AVERAGE_EMA, /* exponential; a copy of the weights until `start` */
    CT_AVERAGE_SWA  /* all states since `start` count alike */
} ct_average_kind;

typedef struct ct_average_config {
    ct_average_kind kind;
    double decay;  /* of CT_AVERAGE_EMA, in [0, 1] */
    int64_t start; /* the first update, counted from 1, that is averaged; >= 0 */
    int64_t every; /* updates between two averages; >= 1 */
} ct_average_config;

typedef struct ct_average {
    ct_average_config config;
    int64_t num_updates; /* of the optimizer, that have been counted */
    int64_t n_averaged;  /* states in the average */
} ct_average;

/* CT_EINVAL names the field at fault. */
CT_NODISCARD ct_status ct_average_init(ct_average *average,
                                       const ct_average_config *config, ct_error *err);

/* Is an average due after the next update? *decay is the weight of the old average. */
bool ct_average_due(const ct_average *average, double *decay);

/* Counts an update, and the average if there was one. */
void ct_average_count(ct_average *average, bool averaged);

/* Takes the last count back: that update was not made. */
void ct_average_take_back(ct_average *average, bool averaged);

#endif
