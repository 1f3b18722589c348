/* LAMB: hyperparameters, and the constants of a step. */
#ifndef CT_LAMB_H
#define CT_LAMB_H

#include "core/base/status.h"
#include "math/lamb.h"

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

#ifdef __cplusplus
}
#endif

#endif
