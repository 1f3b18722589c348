/* Adagrad: hyperparameters, and the constants of a step. */
#ifndef CT_ADAGRAD_H
#define CT_ADAGRAD_H

#include "core/base/status.h"
#include "math/adagrad.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_adagrad_config {
    double lr;           /* >= 0 */
    double lr_decay;     /* >= 0: the rate is lr / (1 + (step - 1) * lr_decay) */
    double eps;          /* >= 0 */
    double weight_decay; /* >= 0, added to the gradient */
} ct_adagrad_config;

/* Works out the constants of step number `step`, which counts from 1. grad_scale is
 * what every gradient is multiplied by first (clip coefficient / loss scale).
 * CT_EINVAL names the hyperparameter at fault. */
CT_NODISCARD ct_status ct_adagrad_coef_init(ct_adagrad_coef *coef,
                                            const ct_adagrad_config *config,
                                            uint64_t step, double grad_scale,
                                            ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
