/* Sums of powers, for a norm of any p.
 *
 * The p-norm is the p-th root of the sum of |x|^p, and with p = Inf the largest |x|.
 * Sums for whole p below 16 and for Inf have no pow() and vectorise. A NaN or Inf in
 * any x makes the sum NaN or Inf, for p = Inf too. */
#ifndef CT_NORM_MATH_H
#define CT_NORM_MATH_H

#include "math/hd.h"

#include <math.h>

typedef enum ct_norm_kind {
    CT_NORM_TWO,
    CT_NORM_ONE,
    CT_NORM_MAX,
    CT_NORM_WHOLE, /* p of 3, 4, ..., 15 */
    CT_NORM_POWER,
    CT_NORM_KIND_COUNT
} ct_norm_kind;

static inline ct_norm_kind
ct_norm_kind_of(double p)
{
    return p == 2.0                                     ? CT_NORM_TWO
           : p == 1.0                                   ? CT_NORM_ONE
           : p == (double)INFINITY                      ? CT_NORM_MAX
           : p > 2.0 && p < 16.0 && p == (double)(int)p ? CT_NORM_WHOLE
                                                        : CT_NORM_POWER;
}

/* Combines two sums; a NaN on either side stays. */
CT_HD static inline double
ct_norm_merge(ct_norm_kind kind, double a, double b)
{
    if (kind == CT_NORM_MAX) {
        return b > a || b != b ? b : a;
    }
    return a + b;
}

/* x^p by the binary digits of p < 16. A digit of 0 multiplies by 1, so the loop over x
 * has no branch. */
CT_HD static inline double
ct_norm_whole_power(double x, int p)
{
    const double x2 = x * x, x4 = x2 * x2, x8 = x4 * x4;
    const double low = ((p & 1) != 0 ? x : 1.0) * ((p & 2) != 0 ? x2 : 1.0);
    const double high = ((p & 4) != 0 ? x4 : 1.0) * ((p & 8) != 0 ? x8 : 1.0);
    return low * high;
}

/* Adds x to a sum. */
CT_HD static inline double
ct_norm_add(ct_norm_kind kind, double p, double sum, double x)
{
    switch (kind) {
    case CT_NORM_TWO:
        return sum + x * x;
    case CT_NORM_WHOLE:
        return sum + ct_norm_whole_power(fabs(x), (int)p);
    case CT_NORM_POWER:
        return sum + pow(fabs(x), p);
    default:
        return ct_norm_merge(kind, sum, fabs(x));
    }
}

/* ---- sums of floats without double ----------------------------------------------- */

/* A sum is high + low, the rests that `high` lost by rounding being added in `low`. A
 * rest is exact (Knuth, "The Art of Computer Programming", volume 2, section 4.2.2,
 * theorem B; the product's by a fused multiplication and addition), but for rests of
 * squares that a float is too coarse for, of less than 2^-149. Kinds: the squares, |x|
 * and, with `low` 0, the largest. */
typedef struct ct_norm_pair {
    float high, low;
} ct_norm_pair;

CT_HD static inline ct_norm_pair
ct_norm_pair_merge(ct_norm_kind kind, ct_norm_pair a, ct_norm_pair b)
{
    ct_norm_pair sum;
    if (kind == CT_NORM_MAX) {
        return b.high > a.high || b.high != b.high ? b : a;
    }
    sum.high = a.high + b.high;
    const float part = sum.high - a.high;
    const float rest = (a.high - (sum.high - part)) + (b.high - part);
    sum.low = (a.low + b.low) + rest;
    return sum;
}

CT_HD static inline ct_norm_pair
ct_norm_pair_add(ct_norm_kind kind, ct_norm_pair sum, float x)
{
    ct_norm_pair power = {fabsf(x), 0.0f};
    if (kind == CT_NORM_TWO) {
        power.high = x * x;
        power.low = fmaf(x, x, -power.high);
    }
    return ct_norm_pair_merge(kind, sum, power);
}

/* Is the sum of up to 2^13 elements off by at most 2^-47 of itself for rests that are
 * too small, 2^13 * 2^-150, and has nothing overflowed? Not so of a sum that is 0. */
CT_HD static inline int
ct_norm_pair_is_exact(ct_norm_kind kind, ct_norm_pair sum)
{
    const float least = 8.0779357e-28f /* 2^-90 */, most = 3.4028235e38f;
    return kind == CT_NORM_MAX || (sum.high >= least && sum.high <= most);
}

/* The norm that a sum is of. */
static inline double
ct_norm_root(double p, double sum)
{
    switch (ct_norm_kind_of(p)) {
    case CT_NORM_TWO:
        return sqrt(sum);
    case CT_NORM_WHOLE:
    case CT_NORM_POWER:
        return pow(sum, 1.0 / p);
    default:
        return sum;
    }
}

#endif
