/* Codes of 8 bits, evenly spaced: x is about code * scale, code a whole number from
 * -127 to 127, and scale the largest magnitude of a block over 127.
 *
 * Only comparisons and correctly rounded operations, so that every device writes the
 * same codes. Inf or NaN makes a block's scale NaN, and with it all that is decoded
 * from the block; what is remembered of it stays as it was.
 *
 * Source: Alistarh et al., "QSGD", 2017 (one scale for a block of values); Karimireddy
 * et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019
 * (what is remembered). */
#ifndef CT_CODES_MATH_H
#define CT_CODES_MATH_H

#include "math/ct_quant_math.h"

#include <math.h>

enum {
    CT_CODES_BLOCK = 256, /* values that share a scale */
    CT_CODES_MOST = 127
};

/* Blocks of n values. */
CT_HD static inline size_t
ct_codes_blocks(size_t n)
{
    return n / CT_CODES_BLOCK + (n % CT_CODES_BLOCK != 0);
}

/* The scale of a block from its largest magnitude. */
CT_HD static inline float
ct_codes_scale(uint32_t magnitude)
{
    return ct_quant_absmax(magnitude) / (float)CT_CODES_MOST;
}

/* The code of x, to nearest even; inverse is ct_quant_scale(scale). */
CT_HD static inline int8_t
ct_codes_nearest(float x, float inverse)
{
    const float most = (float)CT_CODES_MOST, unit = rintf(x * inverse);
    const float low = unit > -most ? unit : -most; /* -127 for a NaN */
    return (int8_t)(low < most ? low : most);
}

#endif
