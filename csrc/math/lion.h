/* Lion for one element, in float and in double.
 *
 * Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023,
 * algorithm 2. */
#ifndef CT_LION_MATH_H
#define CT_LION_MATH_H

#include "math/parts.h"

/* What is constant over one step, worked out in double. */
#define CT_LION_COEF(REAL, FLAG)                                                       \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(decay) /* 1 - lr * weight_decay */                                            \
    REAL(beta1)                                                                        \
    REAL(one_minus_beta1)                                                              \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)
CT_COEF(ct_lion, CT_LION_COEF)

#define CT_FORMULA "math/formula/lion.h"
#include "math/each_real.h"

#endif
