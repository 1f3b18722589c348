/* AdamW: hyperparameters, and the constants of a step. */
#ifndef CT_ADAMW_H
#define CT_ADAMW_H

#include "core/ct_status.h"
#include "math/ct_adamw_math.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_adamw_config {
    double lr;           /* >= 0 */
    double beta1, beta2; /* in [0, 1) */
    double eps;          /* >= 0 */
    double weight_decay; /* >= 0, decoupled from the gradient */
} ct_adamw_config;

/* Works out the constants of step number `step`, which counts from 1. grad_scale is
 * what every gradient is multiplied by first (clip coefficient / loss scale).
 * CT_EINVAL names the hyperparameter at fault. */
CT_NODISCARD ct_status ct_adamw_coef_init(ct_adamw_coef *coef,
                                          const ct_adamw_config *config, uint64_t step,
                                          double grad_scale, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
