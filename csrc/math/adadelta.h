/* Adadelta for one element, in float and in double.
 *
 * Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012, algorithm 1, with
 * the rate and in the order of operations of torch.optim.Adadelta. */
#ifndef CT_ADADELTA_MATH_H
#define CT_ADADELTA_MATH_H

#include "math/parts.h"

/* What is constant over one step, worked out in double. */
#define CT_ADADELTA_COEF(REAL, FLAG)                                                   \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(weight_decay)                                                                 \
    REAL(rho)                                                                          \
    REAL(one_minus_rho)                                                                \
    REAL(eps)
CT_COEF(ct_adadelta, CT_ADADELTA_COEF)

#define CT_FORMULA "math/formula/adadelta.h"
#include "math/each_real.h"

#endif
