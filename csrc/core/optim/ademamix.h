/* AdEMAMix: hyperparameters, and the constants of a step. */
#ifndef CT_ADEMAMIX_H
#define CT_ADEMAMIX_H

#include "core/base/status.h"
#include "math/ademamix.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_ademamix_config {
    double lr;                  /* >= 0 */
    double beta1, beta2, beta3; /* in [0, 1): fast, second moment, slow */
    double alpha;               /* >= 0: the weight of the slow moment */
    double t_alpha; /* >= 0: updates over which alpha grows from 0; NaN: none */
    double t_beta3; /* >= 0: updates over which beta3 grows from beta1; NaN: none */
    double eps;     /* >= 0 */
    double weight_decay; /* >= 0, decoupled from the gradient */
} ct_ademamix_config;

/* Works out the constants of step number `step`, which counts from 1. grad_scale is
 * what every gradient is multiplied by first (clip coefficient / loss scale).
 * CT_EINVAL names the hyperparameter at fault. */
CT_NODISCARD ct_status ct_ademamix_coef_init(ct_ademamix_coef *coef,
                                             const ct_ademamix_config *config,
                                             uint64_t step, double grad_scale,
                                             ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
