/* LAMB: hyperparameters, and the constants of a step. */
#ifndef CORE_OPTIM_LAYERWISE_H
#define CORE_OPTIM_LAYERWISE_H

#include "core/base/status.h"

#include "math/lamb.h"
#include "math/lars.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_lamb_config {
    double lr;            /* >= 0 */
    double beta1, beta2;  /* in [0, 1) */
    double eps;           /* >= 0 */
    double weight_decay;  /* >= 0 */
    double max_grad_norm; /* of all gradients of the kind together; 0: not clipped */
    bool bias_correction;
    bool grad_averaging; /* the average takes 1 - beta1 of the gradient, not all */
    bool decoupled;      /* the decay is a part of the direction, not of the gradient */
    bool trust_always;   /* NVLAMB: the norms count without weight decay too */
} ct_lamb_config;

/* Works out the constants of step number `step`, which counts from 1. grad_scale is
 * what every gradient is multiplied by first. CT_EINVAL names the hyperparameter at
 * fault. */
CT_NODISCARD ct_status ct_lamb_coef_init(ct_lamb_coef *coef,
                                         const ct_lamb_config *config, uint64_t step,
                                         double grad_scale, ct_error *err);

/* Clips by max_grad_norm, once: norm is that of all gradients before any scaling. */
void ct_lamb_clip(ct_lamb_coef *coef, double norm);

/* LARS: hyperparameters, and the constants of a step. */

typedef struct ct_lars_config {
    double lr;           /* >= 0; > 0 where clip is set */
    double momentum;     /* >= 0; 0 keeps no state */
    double dampening;    /* of the gradient in the momentum buffer */
    double weight_decay; /* >= 0 */
    double trust;        /* >= 0; 0: SGD as it is */
    double eps;          /* >= 0, added to the norms that are divided by */
    bool nesterov;       /* needs momentum > 0 and dampening 0 */
    bool clip;           /* lr is an upper bound, as in apex's LARC, not a factor */
} ct_lars_config;

/* Works out the constants of a step; `first` says that the momentum buffer holds
 * nothing yet. CT_EINVAL names the hyperparameter at fault. */
CT_NODISCARD ct_status ct_lars_coef_init(ct_lars_coef *coef,
                                         const ct_lars_config *config, bool first,
                                         double grad_scale, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
