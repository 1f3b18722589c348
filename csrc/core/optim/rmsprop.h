/* RMSprop: hyperparameters, and the constants of a step. */
#ifndef CT_RMSPROP_H
#define CT_RMSPROP_H

#include "core/base/status.h"
#include "math/rmsprop.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

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
