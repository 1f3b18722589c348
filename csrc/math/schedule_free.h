/* Schedule-free AdamW and SGD for one element, in float and in double.
 *
 * Source: Defazio et al., "The Road Less Scheduled", 2024, algorithm 1, in
 * the form of the package schedulefree, which keeps y and z and not x. The parameter is
 * y, where gradients are taken; what the package calls ckp1 is the weight of the new
 * iterate z in the average x. */
#ifndef CT_SCHEDULE_FREE_MATH_H
#define CT_SCHEDULE_FREE_MATH_H

#include "math/parts.h"

/* What is constant over one step, worked out in double. */
#define CT_SCHEDULE_FREE_COEF(REAL, FLAG)                                              \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(weight_decay)                                                                 \
    REAL(lerp)      /* the weight and the start of ct_average, of y and z */           \
    REAL(grad_step) /* lr * (beta1 * (1 - ckp1) - 1) */                                \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)                                                              \
    REAL(inv_bias2) /* 1 / sqrt(1 - beta2^step) */                                     \
    REAL(eps)                                                                          \
    FLAG(from_z)
CT_COEF(ct_schedule_free, CT_SCHEDULE_FREE_COEF)

#define CT_FORMULA "math/formula/schedule_free.h"
#include "math/each_real.h"

#endif
