/* A step along a direction that is given as the gradient: param * decay - step * grad,
 * in float and in double. */
#ifndef CT_DESCEND_MATH_H
#define CT_DESCEND_MATH_H

#include "math/hd.h"

typedef struct ct_descend_coef {
    double decay;
    double step_size;
} ct_descend_coef;

#define CT_FORMULA "math/formula/descend.h"
#include "math/each_real.h"

#endif
