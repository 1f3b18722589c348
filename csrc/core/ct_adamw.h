/* AdamW: hyperparameters, operands and per-step constants. */
#ifndef CT_ADAMW_H
#define CT_ADAMW_H

#include "core/ct_dtype.h"
#include "core/ct_status.h"
#include "math/ct_adamw_math.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_adamw_config {
    double lr;           /* >= 0 */
    double beta1, beta2; /* in [0, 1) */
    double eps;          /* >= 0 */
    double weight_decay; /* >= 0, decoupled from the gradient */
} ct_adamw_config;

/* Four parallel arrays of n elements of one dtype in one device's memory, which do
 * not overlap. Borrowed: whoever fills the span keeps them alive until the stream has
 * drained. Arithmetic is in fp32 for F32, BF16 and F16 and in fp64 for F64. */
typedef struct ct_adamw_span {
    void *grad; /* read; zeroed when the kernel is asked to */
    void *param;
    void *m;
    void *v;
    size_t n;
    ct_dtype dtype;
    uint32_t coef; /* index into the kernel's list of coefficients */
} ct_adamw_span;

/* Works out the constants of step number `step`, which counts from 1. grad_scale is
 * what every gradient is multiplied by first (clip coefficient / loss scale).
 * CT_EINVAL names the hyperparameter at fault. */
CT_NODISCARD ct_status ct_adamw_coef_init(ct_adamw_coef *coef,
                                          const ct_adamw_config *config, uint64_t step,
                                          double grad_scale, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
