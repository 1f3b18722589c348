/* A step along a direction that is given as the gradient: param * decay - step * grad,
 * in float and in double. */
#ifndef CT_DESCEND_MATH_H
#define CT_DESCEND_MATH_H

#include "math/ct_hd.h"

typedef struct ct_descend_coef {
    double decay;
    double step_size;
} ct_descend_coef;

#define CT_FORMULA "math/ct_descend_formula.h"
#include "math/ct_each_real.h"

#endif
