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

/* The lesser, or the limit where x is NaN: an instruction on every device. */
CT_HD static inline float
ct_compact_up_to(float x, float limit)
{
#ifdef __CUDA_ARCH__
    return fminf(x, limit);
#else
    return x < limit ? x : limit;
#endif
}

/* The nearest whole number from -128 to 255, ties to even, as the last byte of the sum
 * with 1.5 * 2^23, where floats are 1 apart. */
CT_HD static inline uint8_t
ct_compact_whole(float x)
{
    return (uint8_t)ct_bits_from_f32(x + 12582912.0f);
}

/* 127 * y for an element of a group with that scale; 0 where the scale is 0 or NaN. */
CT_HD static inline int8_t
ct_compact_from_momentum(float x, float scale)
{
    const float most = scale > 0.0f ? scale : 0.0f, one = scale > 0.0f ? scale : 1.0f;
    const float size = ct_compact_up_to(fabsf(x), most);
    return (int8_t)ct_compact_whole(copysignf(254.0f * size / (one + size), x));
}

/* y / (2 - |y|). */
CT_HD static inline float
ct_compact_part(int8_t value)
{
    const float y = (float)value;
    return y / (254.0f - fabsf(y));
}

CT_HD static inline float
ct_compact_momentum(int8_t value, float scale)
{
    return ct_compact_part(value) * scale;
}

/* What roots of second moments are multiplied by, 0 for a scale of 0 or NaN; and what
 * values are. */
CT_HD static inline float
ct_compact_inverse(float scale)
{
    return scale > 0.0f ? 255.0f / scale : 0.0f;
}

CT_HD static inline float
ct_compact_unit(float scale)
{
    return scale * (1.0f / 255.0f);
}

CT_HD static inline uint8_t
ct_compact_from_variance(float x, float inverse)
{
    const float most = inverse > 0.0f ? 255.0f : 0.0f, least = inverse > 0.0f ? 1 : 0;
    const float root = ct_compact_up_to(sqrtf(x) * inverse, most);
    return ct_compact_whole(x > 0.0f && root < least ? least : root);
}

CT_HD static inline float
ct_compact_variance(uint8_t value, float unit)
{
    const float root = (float)value * unit;
    return root * root;
}

/* ---- master weights -------------------------------------------------------------- */

/* 2^e in bits, of a bfloat16 in the upper half of x: the largest that is not above the
 * number, for subnormal numbers the smallest normal one, for Inf and NaN any. */
CT_HD static inline uint32_t
ct_compact_power(uint32_t x)
{
    const uint32_t power = x & 0x7f800000u;
    const uint32_t normal = power > 0x00800000u ? power : 0x00800000u;
    return normal < 0x7f000000u ? normal : 0x7f000000u;
}

/* Half of the spacing of bfloat16 numbers is 2^(e - 8). */
CT_HD static inline float
ct_compact_master(uint16_t param, int8_t correction)
{
    const uint32_t bits = (uint32_t)param << 16;
    const float part = (float)correction * (0.00390625f / 127.0f);
    return ct_f32_from_bits(bits) + part * ct_f32_from_bits(ct_compact_power(bits));
}

/* The correction of x, which `param` is the nearest bfloat16 of; 0 for Inf and NaN. The
 * difference is exact, and so are the products with 2^(1 - e), whose exponent is 255
 * less that of 2^e, and with 127 * 2^7. */
CT_HD static inline int8_t
ct_compact_correction(float x, uint16_t param)
{
    const uint32_t bits = (uint32_t)param << 16, power = ct_compact_power(bits);
    const float inverse = ct_f32_from_bits((255u << 23) - power);
    const float value = (x - ct_f32_from_bits(bits)) * inverse * 16256.0f;
    return (int8_t)ct_compact_whole((bits & 0x7f800000u) != 0x7f800000u ? value : 0.0f);
}

#endif
