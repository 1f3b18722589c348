/* AdamW, Adam and their kin: hyperparameters, and the constants of a step. */
#ifndef CT_ADAMW_H
#define CT_ADAMW_H

#include "core/base/status.h"
#include "math/adamw.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_adamw_config {
    double lr;           /* >= 0 */
    double beta1, beta2; /* in [0, 1) */
    double eps;          /* >= 0 */
    double weight_decay; /* >= 0 */
    bool decoupled; /* the weight decay shrinks the parameter, as AdamW has it; else it
                     * is added to the gradient, as Adam has it */
    bool amsgrad;   /* the largest second moment so far is what counts */
} ct_adamw_config;

/* Works out the constants of step number `step`, which counts from 1. grad_scale is
 * what every gradient is multiplied by first (clip coefficient / loss scale).
 * CT_EINVAL names the hyperparameter at fault. */
CT_NODISCARD ct_status ct_adamw_coef_init(ct_adamw_coef *coef,
                                          const ct_adamw_config *config, uint64_t step,
                                          double grad_scale, ct_error *err);

/* The same for fairseq's Adam: weight decay is always decoupled, and eps is added to
 * the root of the second moment before that is corrected for its bias. */
CT_NODISCARD ct_status ct_fairseq_adam_coef_init(ct_adamw_coef *coef,
                                                 const ct_adamw_config *config,
                                                 uint64_t step, double grad_scale,
                                                 ct_error *err);

/* By how much RAdam takes back the variance of its adaptive rate at step number `step`:
 * a factor of the rate, or 0 where the averages are not longer than `tractable`, so
 * that the rate is better not adapted. */
double ct_radam_rectification(double beta2, uint64_t step, double tractable);

/* The same for RAdam. Source: Liu et al., "On the Variance of the Adaptive Learning
 * Rate and Beyond", 2020, algorithm 2, in the form of torch.optim.RAdam. */
CT_NODISCARD ct_status ct_radam_coef_init(ct_adamw_coef *coef,
                                          const ct_adamw_config *config, uint64_t step,
                                          double grad_scale, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
