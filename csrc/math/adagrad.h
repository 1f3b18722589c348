/* Adagrad for one element, in float and in double.
 *
 * Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning
 * and Stochastic Optimization", 2011, in the form and order of operations of
 * torch.optim.Adagrad. */
#ifndef CT_ADAGRAD_MATH_H
#define CT_ADAGRAD_MATH_H

#include "math/parts.h"

/* What is constant over one step, worked out in double. */
#define CT_ADAGRAD_COEF(REAL, FLAG)                                                    \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(weight_decay)                                                                 \
    REAL(step_size) /* lr / (1 + (step - 1) * lr_decay) */                             \
    REAL(eps)
CT_COEF(ct_adagrad, CT_ADAGRAD_COEF)

#define CT_FORMULA "math/formula/adagrad.h"
#include "math/each_real.h"

#endif
