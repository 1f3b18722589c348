/* NAdam for one element, in float and in double.
 *
 * Source: Dozat, "Incorporating Nesterov Momentum into Adam", 2016, algorithm 2 with
 * the momenta of its section 2; in the form of torch.optim.NAdam, but that the gradient
 * and its average are added before they are divided.
 */
#ifndef CT_NADAM_MATH_H
#define CT_NADAM_MATH_H

#include "math/parts.h"

/* What is constant over one step of a parameter, worked out in double. With mu(t) for
 * the momentum of step t and M(t) for mu(1) ... mu(t): */
#define CT_NADAM_COEF(REAL, FLAG)                                                      \
    REAL(grad_scale)   /* clip coefficient / loss scale: saves a pass over grads */    \
    REAL(decay)        /* 1 - lr * weight_decay, or 1 where that is not decoupled */   \
    REAL(weight_decay) /* what is added to the gradient, or 0 */                       \
    REAL(lerp)         /* the weight and the start of ct_average */                    \
    REAL(beta2)                                                                        \
    REAL(one_minus_beta2)                                                              \
    REAL(grad_step)   /* lr * (1 - mu(t)) / (1 - M(t)) */                              \
    REAL(moment_step) /* lr * mu(t + 1) / (1 - M(t + 1)) */                            \
    REAL(inv_bias2)   /* 1 / sqrt(1 - beta2^step) */                                   \
    REAL(eps)                                                                          \
    FLAG(from_grad)
CT_COEF(ct_nadam, CT_NADAM_COEF)

#define CT_FORMULA "math/formula/nadam.h"
#include "math/each_real.h"

#endif
