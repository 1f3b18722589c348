/* Scaling and clipping by value of one element, in float and in double. */
#ifndef CT_SCALE_MATH_H
#define CT_SCALE_MATH_H

#include "math/ct_hd.h"

#define CT_FORMULA "math/ct_scale_formula.h"
#include "math/ct_each_real.h"

#endif
