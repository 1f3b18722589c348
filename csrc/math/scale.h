/* Scaling and clipping by value of one element, in float and in double. */
#ifndef CT_SCALE_MATH_H
#define CT_SCALE_MATH_H

#include "math/hd.h"

#define CT_FORMULA "math/formula/scale.h"
#include "math/each_real.h"

#endif
