/* Adagrad: hyperparameters, and the constants of a step. */
#ifndef CORE_OPTIM_ADAGRAD_H
#define CORE_OPTIM_ADAGRAD_H

#include "core/base/status.h"

#include "math/adadelta.h"
#include "math/adagrad.h"
#include "math/rmsprop.h"

#include <stdbool.h>
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

/* Adadelta: hyperparameters, and the constants of a step. */

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

/* RMSprop: hyperparameters, and the constants of a step. */

typedef struct ct_rmsprop_config {
    double lr;           /* >= 0 */
    double alpha;        /* >= 0: what the averages keep, usually below 1 */
    double eps;          /* >= 0 */
    double weight_decay; /* >= 0, added to the gradient */
    double momentum;     /* >= 0; 0 keeps no buffer */
    bool centered;       /* divide by the deviation, not by the root mean square */
} ct_rmsprop_config;

/* Works out the constants of an update. grad_scale is what every gradient is multiplied
 * by first (clip coefficient / loss scale). CT_EINVAL names the hyperparameter at
 * fault. */
CT_NODISCARD ct_status ct_rmsprop_coef_init(ct_rmsprop_coef *coef,
                                            const ct_rmsprop_config *config,
                                            double grad_scale, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
