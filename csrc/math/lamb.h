/* LAMB for one element, in float and in double. A measured rule (math/measured.def).
 *
 * Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
 * minutes", 2020, algorithm 2, with the options of apex's FusedLAMB. */
#ifndef CT_LAMB_MATH_H
#define CT_LAMB_MATH_H

#include "math/hd.h"

#include <math.h>

/* What is constant over one step, worked out in double. */
typedef struct ct_lamb_coef {
    double grad_scale;
    double l2;           /* weight decay that is added to the gradient */
    double beta1, share; /* share: of the gradient in the average */
    double beta2, one_minus_beta2;
    double inv_bias1; /* 1 / (1 - beta1^step) */
    double inv_bias2; /* 1 / sqrt(1 - beta2^step) */
    double eps;
    double weight_decay; /* that is added to the direction */
    double lr;
    double max_grad_norm; /* of all gradients together; 0: not clipped */
    int trusted;          /* the rate is scaled by the norms */
    double step_size;     /* settled: lr * |param| / |direction| */
} ct_lamb_coef;

/* A norm of 0 says nothing about the scale: the rate stays as it is. */
CT_HD static inline void
ct_lamb_settle(ct_lamb_coef *c, const double *sums, double n)
{
    const double direction = sqrt(sums[0]), param = sqrt(sums[1]);
    (void)n;
    c->step_size = c->trusted && direction != 0.0 && param != 0.0
                       ? c->lr * (param / direction)
                       : c->lr;
}

#define CT_FORMULA "math/formula/lamb.h"
#include "math/each_real.h"

#endif
