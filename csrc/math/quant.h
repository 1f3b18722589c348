/* 8-bit state: a quantized value for each element, a map of the values to
 * numbers, and for each block of elements a scale, the largest magnitude in the block.
 *
 * A map is 256 floats in ascending order, from -1 or 0 to 1; the elements of an array
 * are map[value] * absmax[block]. Storing x writes the value of the number nearest to x
 * / absmax. Only comparisons and correctly rounded operations, so that every device
 * writes the same values.
 *
 * Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise
 * Quantization", 2022, sections 2.1 and 2.2; in the layout of bitsandbytes.
 */
#ifndef CT_QUANT_MATH_H
#define CT_QUANT_MATH_H

#include "math/half.h"

#include <float.h>

enum {
    CT_QUANT_BLOCK = 256,   /* elements that share a scale */
    CT_QUANT_MAP_SIZE = 256 /* numbers in a map */
};

/* |x| as an integer, ordered by magnitude, with Inf and NaN above all others. */
CT_HD static inline uint32_t
ct_quant_magnitude(float x)
{
    return ct_bits_from_f32(x) & 0x7fffffffu;
}

/* absmax of a block from the largest magnitude. An Inf or NaN makes absmax and so every
 * element of the block NaN: a bad number does not hide behind a value. */
CT_HD static inline float
ct_quant_absmax(uint32_t magnitude)
{
    return ct_f32_from_bits(magnitude < 0x7f800000u ? magnitude : 0x7fc00000u);
}

/* What the elements of a block are multiplied by: 1 / absmax, as far as that is a
 * float; 0 for a block of zeros or of NaN. */
CT_HD static inline float
ct_quant_scale(float absmax)
{
    const float inverse = absmax > 0.0f ? 1.0f / absmax : 0.0f;
    return inverse <= FLT_MAX ? inverse : FLT_MAX;
}

/* An element between -1 and 1. */
CT_HD static inline float
ct_quant_unit(float x, float scale)
{
    const float unit = x * scale;
    return unit == unit ? unit : 0.0f;
}

/* The middle of two neighbours in a map: greater numbers are nearer to the higher. */
CT_HD static inline float
ct_quant_middle(float low, float high)
{
    return 0.5f * (low + high);
}

/* The value nearest to a unit: the number of middles below it, out of 255. */
CT_HD static inline uint32_t
ct_quant_nearest(const float *middles, float unit)
{
    uint32_t value = 0;
    for (uint32_t step = CT_QUANT_MAP_SIZE / 2; step != 0; step /= 2) {
        value += unit > middles[value + step - 1] ? step : 0;
    }
    return value;
}

#endif
