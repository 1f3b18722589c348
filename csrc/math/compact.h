/* Compact state: moments of 8 bits with a float16 scale for each group of elements, and
 * master weights of 24 bits, a bfloat16 parameter and an 8-bit correction.
 *
 * With y = value / 127, a momentum is scale * y / (2 - |y|): finer near 0 than evenly
 * spaced values. The root of a second moment is scale * value / 255. A master weight is
 * parameter + correction / 127 * (half of the spacing of bfloat16 numbers there).
 *
 * Only comparisons and correctly rounded operations, so that every device writes the
 * same values. Inf or NaN makes a group's scale NaN, and so all its elements: a bad
 * number does not hide behind a value.
 *
 * Source: "FlashOptim: Optimizers for Memory Efficient Training", in the layout of the
 * package flashoptim 0.1.4. Elements are divided by the scale as stored, not by the
 * largest magnitude before rounding, and the value of a second moment above 0 is at
 * least 1: a momentum over a variance of 0 would be a step of momentum / eps.
 */
#ifndef CT_COMPACT_MATH_H
#define CT_COMPACT_MATH_H

#include "math/half.h"

#include <math.h>

enum {
    CT_COMPACT_GROUP = 32, /* elements that share a scale */
    CT_COMPACT_STATES = 2  /* a momentum, a second moment */
};

/* |x| as an integer, ordered by magnitude, with Inf and NaN above all others. */
CT_HD static inline uint32_t
ct_compact_magnitude(float x)
{
    return ct_bits_from_f32(x) & 0x7fffffffu;
}

/* ---- scales ---------------------------------------------------------------------- */

/* The float16 nearest to a largest magnitude, given by its bits: positive and finite
 * where that is. Rounded up, a second moment would never decay: beta2 = 0.999 takes
 * 1/2000 off the root, and neighbours are up to 1/1024 apart. */
CT_HD static inline uint16_t
ct_compact_scale(uint32_t magnitude)
{
    const uint16_t near = ct_f16_from_f32(ct_f32_from_bits(magnitude));
    const uint16_t finite = near < 0x7bff ? near : 0x7bff;
    const uint16_t positive = finite == 0 && magnitude != 0 ? 1 : finite;
    return magnitude < 0x7f800000u ? positive : 0x7e00;
}

/* The same, not above the magnitude: a momentum decays to 0 even where neighbours are
 * further apart than a tenth. */
CT_HD static inline uint16_t
ct_compact_momentum_scale(uint32_t magnitude)
{
    const uint16_t near = ct_compact_scale(magnitude);
    const int above = ct_f32_from_f16(near) > ct_f32_from_bits(magnitude);
    return (uint16_t)(above && near > 1 ? near - 1 : near);
}

/* The scale of roots from the largest second moment. */
CT_HD static inline uint16_t
ct_compact_root_scale(uint32_t magnitude)
{
    return ct_compact_scale(ct_bits_from_f32(sqrtf(ct_f32_from_bits(magnitude))));
}

/* ---- moments --------------------------------------------------------------------- */

/* The nearest whole number from -128 to 255, ties to even, as the last byte of the sum
 * with 1.5 * 2^23, where floats are 1 apart; 0 for a NaN. */
CT_HD static inline uint8_t
ct_compact_whole(float x)
{
    const float sum = (x == x ? x : 0.0f) + 12582912.0f;
    return (uint8_t)ct_bits_from_f32(sum);
}

/* 127 * y for an element of a group with that scale. */
CT_HD static inline int8_t
ct_compact_from_momentum(float x, float scale)
{
    const float below = x < scale ? x : x == x ? scale : x;
    const float inside = below < -scale ? -scale : below;
    const float size = inside < 0.0f ? -inside : inside;
    return (int8_t)ct_compact_whole(254.0f * inside / (scale + size));
}

CT_HD static inline float
ct_compact_momentum(int8_t value, float scale)
{
    const float y = (float)value;
    return y / (254.0f - (y < 0.0f ? -y : y)) * scale;
}

/* What roots of second moments are multiplied by, and what values are. */
CT_HD static inline float
ct_compact_inverse(float scale)
{
    return 255.0f / scale;
}

CT_HD static inline float
ct_compact_unit(float scale)
{
    return scale * (1.0f / 255.0f);
}

CT_HD static inline uint8_t
ct_compact_from_variance(float x, float inverse)
{
    const float root = sqrtf(x) * inverse;
    const float inside = root > 255.0f ? 255.0f : root;
    return ct_compact_whole(inside < 1.0f && x > 0.0f ? 1.0f : inside);
}

CT_HD static inline float
ct_compact_variance(uint8_t value, float unit)
{
    const float root = (float)value * unit;
    return root * root;
}

/* ---- master weights -------------------------------------------------------------- */

/* Half of the spacing of bfloat16 numbers at a finite one, of subnormal numbers
 * that of the smallest normal one. */
CT_HD static inline float
ct_compact_half_ulp(uint16_t param)
{
    const uint32_t exponent = param >> 7 & 0xffu;
    const uint32_t normal = exponent == 0 ? 1 : exponent == 255 ? 254 : exponent;
    return ct_f32_from_bits(normal << 23) * 0.00390625f;
}

CT_HD static inline float
ct_compact_master(uint16_t param, int8_t correction)
{
    const float part = (float)correction * (1.0f / 127.0f);
    return ct_f32_from_bf16(param) + part * ct_compact_half_ulp(param);
}

/* The correction of x, which `param` is the nearest bfloat16 of; 0 for Inf and NaN. The
 * difference in float32 numbers, at most 2^15, needs no power of two that is out of
 * range. Numbers below a power of two, but for the smallest, are half as far apart. */
CT_HD static inline int8_t
ct_compact_correction(float x, uint16_t param)
{
    const int32_t near = (param & 0x7fff) << 16;
    const int32_t apart = (int32_t)(ct_bits_from_f32(x) & 0x7fffffffu) - near;
    const int halved = apart < 0 && (near & 0x7f0000) == 0 && near > 0x800000;
    const float size = (float)apart * (halved ? 127.0f / 65536.0f : 127.0f / 32768.0f);
    const float finite = near < 0x7f800000 ? size : 0.0f;
    return (int8_t)ct_compact_whole((param & 0x8000) != 0 ? -finite : finite);
}

#endif
