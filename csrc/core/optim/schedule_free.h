/* Schedule-free AdamW and SGD: hyperparameters, and the constants of a step. */
#ifndef CT_SCHEDULE_FREE_H
#define CT_SCHEDULE_FREE_H

#include "core/base/status.h"
#include "math/schedule_free.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_schedule_free_config {
    double lr;              /* >= 0 */
    double beta1, beta2;    /* in [0, 1): of the interpolation, of the second moment */
    double eps;             /* >= 0 */
    double weight_decay;    /* >= 0, of y, added to the normalised gradient */
    double r;               /* the average weights update k with k^r ... */
    double weight_lr_power; /* ... times the largest rate so far to this power */
    double warmup_steps;    /* >= 0: the rate grows linearly over so many updates */
    bool silent_sgd_phase;  /* of RAdam: no movement where the rate is not adapted */
    bool train_mode;        /* the parameters hold y: an update needs it */
    /* What the updates so far have made; all 0 before the first. */
    uint64_t k;          /* their number */
    double weight_sum;   /* of the weights in the average */
    double lr_max;       /* the largest rate */
    double scheduled_lr; /* the last rate, warm-up included */
} ct_schedule_free_config;

/* Works out the constants of the next update: of SGD, which uses neither beta2 nor eps
 * and takes beta1 for its momentum, and of AdamW. grad_scale is what every gradient is
 * multiplied by first (clip coefficient / loss scale). CT_EINVAL names the
 * hyperparameter at fault, or says that train_mode is off. */
CT_NODISCARD ct_status ct_schedule_free_coef_init(ct_schedule_free_coef *coef,
                                                  const ct_schedule_free_config *config,
                                                  double grad_scale, ct_error *err);

/* The same for RAdam, whose rate is rectified and has no warm-up. */
CT_NODISCARD ct_status ct_schedule_free_radam_coef_init(
    ct_schedule_free_coef *coef, const ct_schedule_free_config *config,
    double grad_scale, ct_error *err);

/* Note that an update has been done. */
void ct_schedule_free_advance(ct_schedule_free_config *config);
void ct_schedule_free_radam_advance(ct_schedule_free_config *config);

#ifdef __cplusplus
}
#endif

#endif
