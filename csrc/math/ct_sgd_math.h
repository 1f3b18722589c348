/* SGD for one element, in float and in double.
 *
 * Source: Sutskever et al., "On the importance of initialization and momentum in deep
 * learning", 2013, in the form and order of operations of torch.optim.SGD. */
#ifndef CT_SGD_MATH_H
#define CT_SGD_MATH_H

#include "math/ct_hd.h"

/* What is constant over one step, worked out in double. */
typedef struct ct_sgd_coef {
    double grad_scale; /* clip coefficient / loss scale: saves a pass over grads */
    double lr;
    double momentum;
    double one_minus_dampening;
    double weight_decay;
    int nesterov;
    int first; /* the momentum buffer starts as the gradient */
} ct_sgd_coef;

#define CT_FORMULA "math/ct_sgd_formula.h"
#include "math/ct_each_real.h"

#endif
