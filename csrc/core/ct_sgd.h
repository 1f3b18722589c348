/* SGD with momentum: hyperparameters, operands and per-step constants. */
#ifndef CT_SGD_H
#define CT_SGD_H

#include "core/ct_dtype.h"
#include "core/ct_status.h"
#include "math/ct_sgd_math.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

typedef struct ct_sgd_span {
    void *grad; /* read; zeroed when the kernel is asked to */
    void *param;
    void *momentum; /* NULL when the momentum is 0 */
    size_t n;
    ct_dtype dtype;
    uint32_t coef; /* index into the kernel's list of coefficients */
} ct_sgd_span;

/* first says that the momentum buffer holds nothing yet: it then starts as the
 * gradient itself, undampened, as torch.optim.SGD does. */
CT_NODISCARD ct_status ct_sgd_coef_init(ct_sgd_coef *coef, const ct_sgd_config *config,
                                        bool first, double grad_scale, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
