/* Sums of powers: what a norm of any p is made of.
 *
 * The p-norm is the p-th root of the sum of |x|^p, and with p = Inf the largest |x|. p
 * of 1, 2 and Inf have sums without pow(), which vectorise. A NaN or Inf in any x makes
 * the sum NaN or Inf, that of p = Inf too. */
#ifndef CT_NORM_MATH_H
#define CT_NORM_MATH_H

#include "math/ct_hd.h"

#include <math.h>

typedef enum ct_norm_kind {
    CT_NORM_TWO,
    CT_NORM_ONE,
    CT_NORM_MAX,
    CT_NORM_POWER,
    CT_NORM_KIND_COUNT
} ct_norm_kind;

static inline ct_norm_kind
ct_norm_kind_of(double p)
{
    return p == 2.0                ? CT_NORM_TWO
           : p == 1.0              ? CT_NORM_ONE
           : p == (double)INFINITY ? CT_NORM_MAX
                                   : CT_NORM_POWER;
}

/* Two sums made one; a NaN on either side stays. */
CT_HD static inline double
ct_norm_merge(ct_norm_kind kind, double a, double b)
{
    if (kind == CT_NORM_MAX) {
        return b > a || b != b ? b : a;
    }
    return a + b;
}

/* A sum and one more x. */
CT_HD static inline double
ct_norm_add(ct_norm_kind kind, double p, double sum, double x)
{
    switch (kind) {
    case CT_NORM_TWO:
        return sum + x * x;
    case CT_NORM_POWER:
        return sum + pow(fabs(x), p);
    default:
        return ct_norm_merge(kind, sum, fabs(x));
    }
}

/* The norm that a sum is of. */
static inline double
ct_norm_root(double p, double sum)
{
    switch (ct_norm_kind_of(p)) {
    case CT_NORM_TWO:
        return sqrt(sum);
    case CT_NORM_POWER:
        return pow(sum, 1.0 / p);
    default:
        return sum;
    }
}

#endif
