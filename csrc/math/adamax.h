/* Adamax for one element, in float and in double.
 *
 * Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015,
 * algorithm 2. torch.optim.Adamax adds eps to the magnitude of the gradient before the
 * maximum is taken, fairseq's Adamax to the maximum; the other eps is 0. */
#ifndef CT_ADAMAX_MATH_H
#define CT_ADAMAX_MATH_H

#include "math/parts.h"

/* What is constant over one step, worked out in double. */
#define CT_ADAMAX_COEF(REAL, FLAG)                                                     \
    REAL(grad_scale)   /* clip coefficient / loss scale: saves a pass over grads */    \
    REAL(decay)        /* 1 - lr * weight_decay, or 1 where that is not decoupled */   \
    REAL(weight_decay) /* what is added to the gradient, or 0 */                       \
    REAL(lerp)         /* the weight and the start of ct_average */                    \
    REAL(beta2)                                                                        \
    REAL(step_size) /* lr / (1 - beta1^step), or lr */                                 \
    REAL(grad_eps)                                                                     \
    REAL(norm_eps)                                                                     \
    FLAG(from_grad)
CT_COEF(ct_adamax, CT_ADAMAX_COEF)

#define CT_FORMULA "math/formula/adamax.h"
#include "math/each_real.h"

#endif
