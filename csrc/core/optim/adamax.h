/* Adamax, torch's and fairseq's: hyperparameters, and the constants of a step. */
#ifndef CT_ADAMAX_H
#define CT_ADAMAX_H

#include "core/base/status.h"
#include "math/adamax.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_adamax_config {
    double lr;            /* >= 0 */
    double beta1, beta2;  /* in [0, 1) */
    double eps;           /* >= 0 */
    double weight_decay;  /* >= 0 */
    bool bias_correction; /* fairseq's alone: torch always corrects */
} ct_adamax_config;

/* Works out the constants of step number `step`, which counts from 1. grad_scale is
 * what every gradient is multiplied by first (clip coefficient / loss scale).
 * CT_EINVAL names the hyperparameter at fault.
 * torch: the weight decay is added to the gradient, eps to its magnitude. */
CT_NODISCARD ct_status ct_adamax_coef_init(ct_adamax_coef *coef,
                                           const ct_adamax_config *config,
                                           uint64_t step, double grad_scale,
                                           ct_error *err);

/* fairseq: the weight decay is decoupled, eps is added to the norm. */
CT_NODISCARD ct_status ct_fairseq_adamax_coef_init(ct_adamax_coef *coef,
                                                   const ct_adamax_config *config,
                                                   uint64_t step, double grad_scale,
                                                   ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
