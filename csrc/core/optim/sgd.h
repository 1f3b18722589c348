/* SGD with momentum: hyperparameters, and the constants of a step. */
#ifndef CORE_OPTIM_SGD_H
#define CORE_OPTIM_SGD_H

#include "core/base/status.h"

#include "math/lion.h"
#include "math/nag.h"
#include "math/sgd.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_sgd_config {
    double lr;           /* >= 0 */
    double momentum;     /* >= 0; 0 keeps no state */
    double dampening;    /* usually 0; must be 0 with nesterov */
    double weight_decay; /* >= 0, added to the gradient */
    bool nesterov;       /* needs momentum > 0 */
} ct_sgd_config;

/* first says that the momentum buffer holds nothing yet: it then starts as the
 * gradient itself, undampened, as torch.optim.SGD does. */
CT_NODISCARD ct_status ct_sgd_coef_init(ct_sgd_coef *coef, const ct_sgd_config *config,
                                        bool first, double grad_scale, ct_error *err);

/* NAG as fairseq has it: hyperparameters, and the constants of a step. */

typedef struct ct_nag_config {
    double lr;           /* >= 0 */
    double lr_old;       /* of the last update; NaN before the first one */
    double momentum;     /* >= 0 */
    double weight_decay; /* >= 0, decoupled from the gradient */
} ct_nag_config;

/* Works out the constants of an update. grad_scale is what every gradient is multiplied
 * by first (clip coefficient / loss scale). CT_EINVAL names the hyperparameter at
 * fault. */
CT_NODISCARD ct_status ct_nag_coef_init(ct_nag_coef *coef, const ct_nag_config *config,
                                        double grad_scale, ct_error *err);

/* Notes that an update has been done. */
void ct_nag_advance(ct_nag_config *config);

/* Lion: hyperparameters, and the constants of a step. */

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
