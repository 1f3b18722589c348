/* Quantized values of 8 or 4 bits, evenly spaced: x is about value * scale, value a
 * whole number from -127 to 127 or from -7 to 7, and scale the largest magnitude of a
 * block over 127 or 7. The error, the residual, is at most half a scale. Two 4-bit
 * values share a byte, the first in the low half.
 *
 * Only comparisons and correctly rounded operations, so that every device writes the
 * same values. Inf or NaN makes a block's scale NaN, and so all decoded values of the
 * block; the residuals stay unchanged.
 *
 * Source: Alistarh et al., "QSGD", 2017 (a scale for each block of values); Karimireddy
 * et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019
 * (residuals). */
#ifndef CT_MATH_QUANTIZED_H
#define CT_MATH_QUANTIZED_H

#include "math/quant.h"

#include <math.h>

enum {
    CT_QUANTIZED_BLOCK = 256 /* values that share a scale */
};

/* The largest value. */
CT_HD static inline float
ct_quantized_most(int bits)
{
    return bits == 4 ? 7.0f : 127.0f;
}

/* Bytes of n values. */
CT_HD static inline size_t
ct_quantized_bytes(size_t n, int bits)
{
    return bits == 4 ? n / 2 + n % 2 : n;
}

/* Blocks of n values. */
CT_HD static inline size_t
ct_quantized_blocks(size_t n)
{
    return n / CT_QUANTIZED_BLOCK + (n % CT_QUANTIZED_BLOCK != 0);
}

/* The scale of a block from the largest magnitude. */
CT_HD static inline float
ct_quantized_scale(uint32_t magnitude, float most)
{
    return ct_quant_absmax(magnitude) / most;
}

/* The value of x, to nearest even; inverse is ct_quant_scale(scale). */
CT_HD static inline int8_t
ct_quantized_nearest(float x, float inverse, float most)
{
    const float unit = rintf(x * inverse);
    const float low = unit > -most ? unit : -most; /* -most for a NaN */
    return (int8_t)(low < most ? low : most);
}

/* Packs two 4-bit values into a byte, and unpacks them. */
CT_HD static inline int8_t
ct_quantized_pair(int8_t first, int8_t second)
{
    return (int8_t)(((uint8_t)first & 0x0fu) | (uint8_t)((uint8_t)second << 4));
}

CT_HD static inline int8_t
ct_quantized_first(int8_t pair)
{
    const int low = pair & 0x0f;
    return (int8_t)(low < 8 ? low : low - 16);
}

CT_HD static inline int8_t
ct_quantized_second(int8_t pair)
{
    return (int8_t)((pair - (pair & 0x0f)) / 16);
}

#endif
