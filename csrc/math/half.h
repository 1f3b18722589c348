/* bfloat16 and float16, carried as uint16_t, to and from float.
 *
 * Narrowing rounds to nearest, ties to even; too large becomes Inf; NaN stays NaN,
 * quiet, with the sign and as many payload bits as fit. No branches, so that loops
 * vectorise, and no subnormal intermediate float, so that results do not depend on a
 * flush-to-zero mode. Compiles as C11 and as CUDA C++. */
#ifndef CT_HALF_MATH_H
#define CT_HALF_MATH_H

#include "math/hd.h"

#include <stdint.h>
#include <string.h>

CT_HD static inline uint32_t
ct_bits_from_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

CT_HD static inline float
ct_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* bfloat16 is the upper half of a float. */
CT_HD static inline float
ct_f32_from_bf16(uint16_t half)
{
    return ct_f32_from_bits((uint32_t)half << 16);
}

/* The upper half is the bfloat16; the lower half is a rest of the addition. */
CT_HD static inline uint32_t
ct_bf16_above_f32(float value)
{
    const uint32_t bits = ct_bits_from_f32(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t quiet = bits | 0x400000u;

    return (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}

CT_HD static inline uint16_t
ct_bf16_from_f32(float value)
{
    return (uint16_t)(ct_bf16_above_f32(value) >> 16);
}

/* Two adjacent bfloat16 as a word: a loop over words avoids spreading and gathering
 * 16-bit lanes. */
CT_HD static inline uint32_t
ct_bf16_pair(const uint16_t *from)
{
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}

CT_HD static inline float
ct_f32_from_bf16_low(uint32_t pair)
{
    return ct_f32_from_bits(pair << 16);
}

CT_HD static inline float
ct_f32_from_bf16_high(uint32_t pair)
{
    return ct_f32_from_bits(pair & 0xffff0000u);
}

CT_HD static inline void
ct_bf16_pair_store(uint16_t *to, float low, float high)
{
    const uint32_t pair =
        ct_bf16_above_f32(low) >> 16 | (ct_bf16_above_f32(high) & 0xffff0000u);
    memcpy(to, &pair, sizeof pair);
}

/* Rounds up in magnitude with a probability equal to the fraction lost by rounding
 * down, else down: right on average. `random` is 16 random bits. A value beyond the
 * largest bfloat16 may become Inf; NaN stays NaN and Inf stays Inf. */
CT_HD static inline uint16_t
ct_bf16_from_f32_stochastic(float value, uint32_t random)
{
    const uint32_t bits = ct_bits_from_f32(value);
    const uint32_t rounded = (bits + random) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    const uint32_t size = bits & 0x7fffffffu;

    return (uint16_t)(size > 0x7f800000u    ? quiet
                      : size == 0x7f800000u ? bits >> 16
                                            : rounded);
}

/* float16: 1 sign, 5 exponent (bias 15), 10 mantissa bits. Exponent 31 is Inf or NaN
 * and moves to 255. Exponent 0 counts units of 2^-24: with the exponent of
 * 2^-14 the value is 2^-14 too large, and an exact subtraction corrects it. */
CT_HD static inline float
ct_f32_from_f16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t shifted = (uint32_t)(half & 0x7fffu) << 13;
    const uint32_t exponent = shifted & 0x0f800000u;
    const uint32_t normal = shifted + (112u << 23);
    const uint32_t special = shifted + (224u << 23);
    const uint32_t tiny = ct_bits_from_f32(ct_f32_from_bits(shifted + (113u << 23)) -
                                           ct_f32_from_bits(113u << 23));
    const uint32_t finite = exponent == 0 ? tiny : normal;

    return ct_f32_from_bits(sign | (exponent == 0x0f800000u ? special : finite));
}

/* Below 2^-14 the result counts units of 2^-24, the spacing of floats in [0.5, 1):
 * adding 0.5 rounds to these units. From 65520 on the nearest is Inf. */
CT_HD static inline uint16_t
ct_f16_from_f32(float value)
{
    const uint32_t bits = ct_bits_from_f32(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t size = bits & 0x7fffffffu;
    const uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    const uint32_t tiny = ct_bits_from_f32(ct_f32_from_bits(size) + 0.5f) - 0x3f000000u;
    const uint32_t quiet = 0x7e00u | ((size >> 13) & 0x3ffu);
    const uint32_t finite = size < (113u << 23) ? tiny : normal;
    const uint32_t bounded = size < 0x477ff000u ? finite : 0x7c00u;

    return (uint16_t)(sign | (size > 0x7f800000u ? quiet : bounded));
}

/* Rounds a double to odd: an exact float stays, else the neighbour with an odd last
 * bit. Rounding the result to bf16 or fp16 equals rounding the double directly. */
CT_HD static inline float
ct_f32_round_to_odd(double value)
{
    const float near = (float)value;
    const double back = (double)near;
    const uint32_t bits = ct_bits_from_f32(near);
    const double size = value < 0 ? -value : value;
    const double near_size = back < 0 ? -back : back;
    const uint32_t odd = near_size > size ? bits - 1u : bits + 1u;

    return ct_f32_from_bits(back == value || (bits & 1u) != 0 ? bits : odd);
}

CT_HD static inline uint16_t
ct_bf16_from_f64(double value)
{
    return ct_bf16_from_f32(ct_f32_round_to_odd(value));
}

CT_HD static inline uint16_t
ct_f16_from_f64(double value)
{
    return ct_f16_from_f32(ct_f32_round_to_odd(value));
}

#endif
