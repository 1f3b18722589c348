/* AdEMAMix for one element, in float and in double.
 *
 * Source: Pagliardini, Ablin and Grangier, "The AdEMAMix Optimizer: Better, Faster,
 * Older", 2024, algorithm 1. As in math/adamw.h the root of the second moment is
 * multiplied by a rounded 1 / sqrt(1 - beta2^step). */
#ifndef CT_ADEMAMIX_MATH_H
#define CT_ADEMAMIX_MATH_H

#include "math/parts.h"

/* What is constant over one step, worked out in double. */
#define CT_ADEMAMIX_COEF(REAL, FLAG)                                                   \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(decay)      /* 1 - lr * weight_decay */                                       \
    REAL(lr)                                                                           \
    REAL(fast) /* the weight and, below, the start of ct_average */                    \
    REAL(slow) /* the same of the slow average */                                      \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)                                                              \
    REAL(inv_bias1) /* 1 / (1 - beta1^step) */                                         \
    REAL(inv_bias2) /* 1 / sqrt(1 - beta2^step) */                                     \
    REAL(alpha)                                                                        \
    REAL(eps)                                                                          \
    FLAG(fast_from_grad)                                                               \
    FLAG(slow_from_grad)
CT_COEF(ct_ademamix, CT_ADEMAMIX_COEF)

#define CT_FORMULA "math/formula/ademamix.h"
#include "math/each_real.h"

#endif
