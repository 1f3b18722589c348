/* RMSprop for one element, in float and in double.
 *
 * Source: Hinton, "Neural Networks for Machine Learning", 2012, lecture 6, and Graves,
 * "Generating Sequences With Recurrent Neural Networks", 2013, for the centred form, in
 * the form and order of operations of torch.optim.RMSprop. One thing differs: where the
 * centred variance is negative by rounding it counts as 0; torch's root gives NaN. */
#ifndef CT_RMSPROP_MATH_H
#define CT_RMSPROP_MATH_H

#include "math/parts.h"

/* What is constant over one step, worked out in double. */
#define CT_RMSPROP_COEF(REAL, FLAG)                                                    \
    REAL(grad_scale) /* clip coefficient / loss scale: saves a pass over grads */      \
    REAL(lr)                                                                           \
    REAL(weight_decay)                                                                 \
    REAL(alpha)                                                                        \
    REAL(one_minus_alpha)                                                              \
    REAL(lerp) /* the weight and the start of ct_average */                            \
    REAL(momentum)                                                                     \
    REAL(eps)                                                                          \
    FLAG(from_grad)
CT_COEF(ct_rmsprop, CT_RMSPROP_COEF)

#define CT_FORMULA "math/formula/rmsprop.h"
#include "math/each_real.h"

#endif
