/* What the formulas of several rules have in common, in float and in double. */
#ifndef CT_PARTS_MATH_H
#define CT_PARTS_MATH_H

#include "math/coef.h"

#include <math.h>

/* The constants of a moving average x * keep + y * (1 - keep); ct_average computes x +
 * weight * (y - x), or starts from y if nearer: keep <= 0.5. */
static inline double
ct_average_weight(double keep)
{
    return keep <= 0.5 ? -keep : 1.0 - keep;
}

static inline int
ct_average_from_new(double keep)
{
    return keep <= 0.5;
}

#define CT_FORMULA "math/formula/parts.h"
#include "math/each_real.h"

#endif
