/* Lion: hyperparameters, and the constants of a step. */
#ifndef CT_LION_H
#define CT_LION_H

#include "core/base/status.h"
#include "math/lion.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_lion_config {
    double lr;           /* >= 0 */
    double beta1, beta2; /* in [0, 1): of the direction, of the moment */
    double weight_decay; /* >= 0, decoupled from the gradient */
} ct_lion_config;

/* Works out the constants of an update. grad_scale is what every gradient is multiplied
 * by first (clip coefficient / loss scale). CT_EINVAL names the hyperparameter at
 * fault. */
CT_NODISCARD ct_status ct_lion_coef_init(ct_lion_coef *coef,
                                         const ct_lion_config *config,
                                         double grad_scale, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
