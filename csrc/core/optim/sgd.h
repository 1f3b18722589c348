/* SGD with momentum: hyperparameters, and the constants of a step. */
#ifndef CT_SGD_H
#define CT_SGD_H

#include "core/base/status.h"
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

#ifdef __cplusplus
}
#endif

#endif
