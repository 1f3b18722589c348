/* AdamW, Adam and their kin: hyperparameters, and the constants of a step. */
#ifndef CORE_OPTIM_ADAM_H
#define CORE_OPTIM_ADAM_H

#include "core/base/status.h"

#include "math/adamax.h"
#include "math/adamw.h"
#include "math/ademamix.h"
#include "math/nadam.h"

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

/* Adamax, torch's and fairseq's: hyperparameters, and the constants of a step. */

typedef struct ct_adamax_config {
    double lr;            /* >= 0 */
    double beta1, beta2;  /* in [0, 1) */
    double eps;           /* >= 0 */
    double weight_decay;  /* >= 0 */
    bool bias_correction; /* fairseq's alone: torch always corrects */
} ct_adamax_config;

/* Works out the constants of step number `step`, which counts from 1. grad_scale is
 * what every gradient is multiplied by first (clip coefficient / loss scale).
 * CT_EINVAL names the hyperparameter at fault.
 * torch: the weight decay is added to the gradient, eps to its magnitude. */
CT_NODISCARD ct_status ct_adamax_coef_init(ct_adamax_coef *coef,
                                           const ct_adamax_config *config,
                                           uint64_t step, double grad_scale,
                                           ct_error *err);

/* fairseq: the weight decay is decoupled, eps is added to the norm. */
CT_NODISCARD ct_status ct_fairseq_adamax_coef_init(ct_adamax_coef *coef,
                                                   const ct_adamax_config *config,
                                                   uint64_t step, double grad_scale,
                                                   ct_error *err);

/* NAdam: hyperparameters, and the constants of a step. */

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

/* AdEMAMix: hyperparameters, and the constants of a step. */

typedef struct ct_ademamix_config {
    double lr;                  /* >= 0 */
    double beta1, beta2, beta3; /* in [0, 1): fast, second moment, slow */
    double alpha;               /* >= 0: the weight of the slow moment */
    double t_alpha; /* >= 0: updates over which alpha grows from 0; NaN: none */
    double t_beta3; /* >= 0: updates over which beta3 grows from beta1; NaN: none */
    double eps;     /* >= 0 */
    double weight_decay; /* >= 0, decoupled from the gradient */
} ct_ademamix_config;

/* Works out the constants of step number `step`, which counts from 1. grad_scale is
 * what every gradient is multiplied by first (clip coefficient / loss scale).
 * CT_EINVAL names the hyperparameter at fault. */
CT_NODISCARD ct_status ct_ademamix_coef_init(ct_ademamix_coef *coef,
                                             const ct_ademamix_config *config,
                                             uint64_t step, double grad_scale,
                                             ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
