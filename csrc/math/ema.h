/* An exponential moving average for one element, in float and in double.
 *
 * Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging",
 * 1992, with exponential weights; in the order of operations of fairseq's EMA
 * (mul_, then add_ with alpha). */
#ifndef CT_EMA_MATH_H
#define CT_EMA_MATH_H

#include "math/hd.h"

typedef struct ct_ema_coef {
    double decay, rest; /* rest = 1 - decay */
} ct_ema_coef;

CT_HD static inline ct_ema_coef
ct_ema_coef_of(double decay)
{
    ct_ema_coef coef;
    coef.decay = decay;
    coef.rest = 1.0 - decay;
    return coef;
}

#define CT_FORMULA "math/formula/ema.h"
#include "math/each_real.h"

#endif
