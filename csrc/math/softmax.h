/* Exponentials and the cross entropy of one row of logits.
 *
 * exp(x) for x <= 0 is 2^k * exp(r) with x = k * ln 2 + r, |r| <= ln(2) / 2, and a
 * Taylor polynomial for exp(r): no call and no branch, so that loops vectorise, and
 * correctly rounded operations alone, so that every instruction set and the GPU agree.
 * Source of the reduction: Cody and Waite, "Software Manual for the Elementary
 * Functions", 1980, chapter 6. */
#ifndef CT_SOFTMAX_MATH_H
#define CT_SOFTMAX_MATH_H

#include "math/half.h"
#include "math/hd.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* 2^k from k + 1.5 * 2^23, or in double 1.5 * 2^52, whose last bits are k. Up to the
 * smallest normal number. */
CT_HD static inline float
ct_power_of_two_f32(float shifted)
{
    return ct_f32_from_bits((ct_bits_from_f32(shifted) + 127u) << 23);
}

CT_HD static inline double
ct_power_of_two_f64(double shifted)
{
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023u) << 52;
    memcpy(&shifted, &bits, sizeof bits);
    return shifted;
}

#define CT_FORMULA "math/formula/softmax.h"
#include "math/each_real.h"

/* Results of the passes over a row of logits. */
typedef struct ct_softmax_row {
    double most;   /* the largest logit */
    double sum;    /* of exp(logit - most) */
    double total;  /* of the logits; 0 without smoothing */
    double target; /* the target's logit */
} ct_softmax_row;

/* (1 - smoothing) * -log p(target) + smoothing * the mean over classes of -log p.
 * Source: Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7. */
CT_HD static inline double
ct_softmax_loss(const ct_softmax_row *row, double smoothing, size_t classes)
{
    const double normaliser = row->most + log(row->sum);
    const double nll = normaliser - row->target;
    if (smoothing == 0.0) {
        return nll; /* logits of -inf would make 0 * inf */
    }
    return (1.0 - smoothing) * nll +
           smoothing * (normaliser - row->total / (double)classes);
}

/* The derivative by the target's logit, exp(logit - most) being `power`: in double, as
 * p - 1 loses digits for a p near 1. */
CT_HD static inline double
ct_softmax_target_grad(const ct_softmax_row *row, double power, double smoothing,
                       size_t classes, double scale)
{
    const double rest = (power - row->sum) / row->sum; /* p - 1 */
    return scale * (rest + smoothing * (1.0 - 1.0 / (double)classes));
}

#endif
