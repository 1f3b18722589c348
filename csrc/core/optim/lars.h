/* LARS: hyperparameters, and the constants of a step. */
#ifndef CT_LARS_H
#define CT_LARS_H

#include "core/base/status.h"
#include "math/lars.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

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
