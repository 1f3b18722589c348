/* LARS for one element, in float and in double. A measured rule (math/measured.def).
 *
 * Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
 * 2017, algorithm 1: SGD whose gradient is scaled for each parameter by
 * trust * |w| / (|g| + weight_decay * |w|), with apex's option to clip the rate. */
#ifndef CT_LARS_MATH_H
#define CT_LARS_MATH_H

#include "math/hd.h"

#include <math.h>

/* What is constant over one step, worked out in double. */
typedef struct ct_lars_coef {
    double grad_scale;
    double lr;
    double momentum;
    double one_minus_dampening;
    double weight_decay;
    double trust; /* 0: the gradient is not scaled */
    double eps;
    int clip; /* the rate trust asks for is an upper bound of lr, not a factor */
    int nesterov;
    int first;           /* the momentum buffer starts as the gradient */
    double ratio, decay; /* settled: ratio * (grad + decay * param) is the gradient */
} ct_lars_coef;

/* Where a norm is 0 the gradient is taken as it is, without the weight decay. */
CT_HD static inline void
ct_lars_settle(ct_lars_coef *c, const double *sums, double n)
{
    const double grad = sqrt(sums[0]), param = sqrt(sums[1]);
    double ratio = c->trust * param / (grad + c->weight_decay * param + c->eps);
    const int scaled = c->trust != 0.0 && grad != 0.0 && param != 0.0;
    (void)n;
    if (c->clip) {
        ratio = ratio / c->lr;
        ratio = ratio < 1.0 ? ratio : 1.0;
    }
    c->ratio = scaled ? ratio : 1.0;
    c->decay = scaled || c->trust == 0.0 ? c->weight_decay : 0.0;
}

#define CT_FORMULA "math/formula/lars.h"
#include "math/each_real.h"

#endif
