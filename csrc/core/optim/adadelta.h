/* Adadelta: hyperparameters, and the constants of a step. */
#ifndef CT_ADADELTA_H
#define CT_ADADELTA_H

#include "core/base/status.h"
#include "math/adadelta.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_adadelta_config {
    double lr;           /* >= 0 */
    double rho;          /* in [0, 1] */
    double eps;          /* >= 0 */
    double weight_decay; /* >= 0, added to the gradient */
} ct_adadelta_config;

/* Works out the constants of an update. grad_scale is what every gradient is multiplied
 * by first (clip coefficient / loss scale). CT_EINVAL names the hyperparameter at
 * fault. */
CT_NODISCARD ct_status ct_adadelta_coef_init(ct_adadelta_coef *coef,
                                             const ct_adadelta_config *config,
                                             double grad_scale, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
