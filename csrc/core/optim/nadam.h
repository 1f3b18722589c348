/* NAdam: hyperparameters, and the constants of a step. */
#ifndef CT_NADAM_H
#define CT_NADAM_H

#include "core/base/status.h"
#include "math/nadam.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_nadam_config {
    double lr;           /* >= 0 */
    double beta1, beta2; /* in [0, 1) */
    double eps;          /* >= 0 */
    double weight_decay; /* >= 0 */
    double
        momentum_decay; /* >= 0: how fast the momentum grows from beta1 / 2 to beta1 */
    bool decoupled;     /* as ct_adamw_config has it */
} ct_nadam_config;

/* The momentum of step number `step`: beta1 * (1 - 0.96^(step * momentum_decay) / 2).
 */
double ct_nadam_momentum(const ct_nadam_config *config, uint64_t step);

/* Works out the constants of step number `step`, which counts from 1, but for
 * grad_step and moment_step. grad_scale is what every gradient is multiplied by first
 * (clip coefficient / loss scale). CT_EINVAL names the hyperparameter at fault. */
CT_NODISCARD ct_status ct_nadam_coef_init(ct_nadam_coef *coef,
                                          const ct_nadam_config *config, uint64_t step,
                                          double grad_scale, ct_error *err);

/* And those, from the product of the momenta of all steps up to this one. */
void ct_nadam_coef_complete(ct_nadam_coef *coef, const ct_nadam_config *config,
                            uint64_t step, double product);

#ifdef __cplusplus
}
#endif

#endif
