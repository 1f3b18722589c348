/* SGD for one element, in float and in double.
 *
 * Source: Sutskever et al., "On the importance of initialization and momentum in deep
 * learning", 2013, in the form and order of operations of torch.optim.SGD. */
#ifndef CT_SGD_MATH_H
#define CT_SGD_MATH_H

#include "math/parts.h"

/* What is constant over one step, worked out in double. */
#define CT_SGD_COEF(REAL, FLAG)                                                        \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(momentum)                                                                     \
    REAL(one_minus_dampening)                                                          \
    REAL(weight_decay)                                                                 \
    FLAG(nesterov)                                                                     \
    FLAG(first) /* the momentum buffer starts as the gradient */
CT_COEF(ct_sgd, CT_SGD_COEF)

#define CT_FORMULA "math/formula/sgd.h"
#include "math/each_real.h"

#endif
