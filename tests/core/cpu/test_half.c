#include "ct_random.h"
#include "ct_test.h"
#include "math/half.h"

#include <math.h>
#include <stdbool.h>

/* A 16-bit float by its definition, with ldexp and nothing else. */
typedef struct format {
    int exponent_bits, mantissa_bits;
} format;

static const format F16 = {5, 10};
static const format BF16 = {8, 7};

static double
value_of(format f, uint16_t half)
{
    const int bias = (1 << (f.exponent_bits - 1)) - 1;
    const int exponent = (half >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
    const int mantissa = half & ((1 << f.mantissa_bits) - 1);
    const double sign = half & 0x8000 ? -1.0 : 1.0;
    if (exponent == (1 << f.exponent_bits) - 1) {
        return mantissa == 0 ? sign * INFINITY : NAN;
    }
    if (exponent == 0) {
        return sign * ldexp(mantissa, 1 - bias - f.mantissa_bits);
    }
    return sign *
           ldexp(mantissa + (1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

/* The nearest 16-bit float, ties to even: nearbyint in units of the last place. The
 * encoding of a magnitude counts those units, so a carry into the exponent is right. */
static uint16_t
nearest(format f, double value)
{
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double size = fabs(value);
    const int bias = (1 << (f.exponent_bits - 1)) - 1;
    const uint16_t infinity =
        (uint16_t)(((1 << f.exponent_bits) - 1) << f.mantissa_bits);
    if (isinf(size)) {
        return sign | infinity;
    }
    int exponent = 1 - bias; /* that of subnormals, at least */
    if (size != 0.0 && ilogb(size) > exponent) {
        exponent = ilogb(size);
    }
    const double units = nearbyint(ldexp(size, f.mantissa_bits - exponent));
    const double code = units + ldexp(exponent - (1 - bias), f.mantissa_bits);
    return sign | (code > infinity ? infinity : (uint16_t)code);
}

static bool
same(double a, double b)
{
    return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b);
}

static void
test_every_half_widens_to_its_value_and_comes_back(void)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        const uint16_t half = (uint16_t)h;
        const float from_f16 = ct_f32_from_f16(half);
        const float from_bf16 = ct_f32_from_bf16(half);
        CHECK(same(from_f16, value_of(F16, half)));
        CHECK(same(from_bf16, value_of(BF16, half)));
        if (!isnan(from_f16)) {
            CHECK(ct_f16_from_f32(from_f16) == half);
            CHECK(ct_f16_from_f64(from_f16) == half);
        }
        if (!isnan(from_bf16)) {
            CHECK(ct_bf16_from_f32(from_bf16) == half);
            CHECK(ct_bf16_from_f64(from_bf16) == half);
        }
    }
}

static void
test_floats_of_every_exponent_narrow_to_the_nearest(void)
{
    for (uint64_t bits = 0; bits < 0x100000000u; bits += 4099) { /* a prime */
        const float value = ct_f32_from_bits((uint32_t)bits);
        if (!isnan(value)) {
            CHECK(ct_f16_from_f32(value) == nearest(F16, value));
            CHECK(ct_bf16_from_f32(value) == nearest(BF16, value));
        }
    }
}

/* Ties and their neighbours are where rounding goes wrong, and rounding a double to
 * float on the way is wrong just beside a tie. */
static void
test_halfway_points_and_their_neighbours(void)
{
    for (uint32_t h = 0; h < 0x7c00; h++) {
        const double low = value_of(F16, (uint16_t)h);
        const double high = h + 1 < 0x7c00 ? value_of(F16, (uint16_t)(h + 1)) : 65536.0;
        const double tie = (low + high) / 2;
        const double around[] = {nextafter(tie, -INFINITY), tie,
                                 nextafter(tie, INFINITY)};
        for (int i = 0; i < 3; i++) {
            CHECK(ct_f16_from_f64(around[i]) == nearest(F16, around[i]));
            CHECK(ct_f16_from_f64(-around[i]) == nearest(F16, -around[i]));
        }
        CHECK(ct_f16_from_f32((float)tie) == nearest(F16, tie));
    }
    for (uint32_t h = 0; h < 0x7f7f; h++) {
        const double tie =
            (value_of(BF16, (uint16_t)h) + value_of(BF16, (uint16_t)(h + 1))) / 2;
        const double around[] = {nextafter(tie, -INFINITY), tie,
                                 nextafter(tie, INFINITY)};
        for (int i = 0; i < 3; i++) {
            CHECK(ct_bf16_from_f64(around[i]) == nearest(BF16, around[i]));
        }
    }
}

static void
test_random_doubles_narrow_to_the_nearest(void)
{
    ct_random r = {42};
    for (int i = 0; i < 2000000; i++) {
        const int exponent = (int)ct_random_below(&r, 300) - 160;
        const double value = ldexp(ct_random_unit(&r), exponent);
        CHECK(ct_f16_from_f64(value) == nearest(F16, value));
        CHECK(ct_bf16_from_f64(value) == nearest(BF16, value));
    }
}

static void
test_nan_stays_nan_with_its_sign_and_payload(void)
{
    for (uint32_t payload = 1; payload < 0x800000; payload += 997) {
        for (uint32_t sign = 0; sign < 2; sign++) {
            const uint32_t bits = sign << 31 | 0x7f800000u | payload;
            const float value = ct_f32_from_bits(bits);
            const uint16_t f16 = ct_f16_from_f32(value);
            const uint16_t bf16 = ct_bf16_from_f32(value);
            CHECK(f16 == (sign << 15 | 0x7e00u | payload >> 13));
            CHECK(bf16 == (sign << 15 | 0x7fc0u | payload >> 16));
            CHECK((ct_bits_from_f32(ct_f32_from_f16(f16)) >> 13 & 0x3ffu) ==
                  (f16 & 0x3ffu));
        }
    }
    CHECK(isnan(ct_f32_from_f16(ct_f16_from_f64(NAN))));
    CHECK(isnan(ct_f32_from_bf16(ct_bf16_from_f64(-NAN))));
}

static void
test_too_large_becomes_infinity(void)
{
    CHECK(ct_f16_from_f32(65519.99f) == 0x7bff && ct_f16_from_f32(65520.0f) == 0x7c00);
    CHECK(ct_f16_from_f64(65519.999999999) == 0x7bff);
    CHECK(ct_f16_from_f64(1e300) == 0x7c00 && ct_f16_from_f64(-1e300) == 0xfc00);
    CHECK(ct_bf16_from_f64(1e300) == 0x7f80 &&
          ct_bf16_from_f32(-0x1.fffffep127f) == 0xff80);
}

int
main(void)
{
    test_every_half_widens_to_its_value_and_comes_back();
    test_floats_of_every_exponent_narrow_to_the_nearest();
    test_halfway_points_and_their_neighbours();
    test_random_doubles_narrow_to_the_nearest();
    test_nan_stays_nan_with_its_sign_and_payload();
    test_too_large_becomes_infinity();
    return 0;
}
