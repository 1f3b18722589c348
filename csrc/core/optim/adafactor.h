/* Adafactor: hyperparameters, and the constants of a step. */
#ifndef CT_ADAFACTOR_H
#define CT_ADAFACTOR_H

#include "core/base/status.h"
#include "math/adafactor.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A parameter's state arrays; those of rows and columns where it has two dimensions or
 * more, else the whole second moment. */
enum {
    CT_ADAFACTOR_SQ,
    CT_ADAFACTOR_AVG,
    CT_ADAFACTOR_ROW,
    CT_ADAFACTOR_COL,
    CT_ADAFACTOR_RMS
};

typedef struct ct_adafactor_config {
    double lr;             /* >= 0; not used where relative_step is set */
    double eps;            /* >= 0, added to the squared gradient */
    double eps2;           /* >= 0, the least root mean square of a parameter */
    double clip_threshold; /* > 0, the root mean square that an update may have */
    double decay_rate;     /* <= 0: the second moment decays by 1 - step^decay_rate */
    double beta1;          /* in [0, 1); NaN: there is no first moment */
    double weight_decay;   /* >= 0 */
    bool scale_parameter;  /* the rate is scaled by the parameter's root mean square */
    bool relative_step;    /* the rate is 1 / sqrt(step), at most 0.01 */
    bool warmup_init;      /* ... at most 1e-6 * step */
} ct_adafactor_config;

/* Works out the constants of step number `step`, which counts from 1, for a parameter
 * whose second moment is factored or not. CT_EINVAL names the hyperparameter at
 * fault. */
CT_NODISCARD ct_status ct_adafactor_coef_init(ct_adafactor_coef *coef,
                                              const ct_adafactor_config *config,
                                              uint64_t step, bool factored,
                                              double grad_scale, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
