/* NAG as fairseq has it: hyperparameters, and the constants of a step. */
#ifndef CT_NAG_H
#define CT_NAG_H

#include "core/base/status.h"
#include "math/nag.h"

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif

#endif
