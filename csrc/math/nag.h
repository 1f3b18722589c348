/* Nesterov's accelerated gradient for one element, as fairseq has it, in float and in
 * double.
 *
 * Source: Nesterov's method with the parameter kept at the point that it looks ahead to
 * (Bengio, Boulanger-Lewandowski and Pascanu, "Advances in Optimizing Recurrent
 * Networks", 2013, eq. 6 and 7), in the order of operations of fairseq's
 * optim/nag.py. The momentum is of updates, not of gradients, so a change of the rate
 * rescales it. */
#ifndef CT_NAG_MATH_H
#define CT_NAG_MATH_H

#include "math/parts.h"

/* What is constant over one step, worked out in double. */
#define CT_NAG_COEF(REAL, FLAG)                                                        \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(decay)      /* 1 - lr * weight_decay */                                       \
    REAL(carry)      /* momentum * lr / the last lr */                                 \
    REAL(ahead)      /* momentum * carry */                                            \
    REAL(grad_step)  /* (1 + momentum) * lr */                                         \
    REAL(lr)
CT_COEF(ct_nag, CT_NAG_COEF)

#define CT_FORMULA "math/formula/nag.h"
#include "math/each_real.h"

#endif
