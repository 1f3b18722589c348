/* Codes of 8 and 4 bits: what they miss, what is remembered of it, and NaN. */
#include "core/device/device.h"
#include "ct_kernels.h"
#include "ct_random.h"
#include "ct_test.h"
#include "math/quantized.h"

#include <math.h>
#include <string.h>

enum {
    N = 701 /* two whole blocks, and one of an odd length */
};

typedef struct coded {
    float values[N], residual[N], scales[3], decoded[N];
    int8_t quantized[N];
    int bits;
} coded;

static coded
example(int bits)
{
    coded c = {.bits = bits};
    ct_random r = {7};
    for (size_t i = 0; i < N; i++) {
        c.values[i] = (float)(2.0 * ct_random_unit(&r));
        c.residual[i] = (float)(0.01 * ct_random_unit(&r));
    }
    return c;
}

static void
encode(coded *c)
{
    const ct_encoding e = {
        .values = {c->values, N, CT_F32},
        .residual = c->residual,
        .quantized = c->quantized,
        .scales = c->scales,
        .bits = c->bits
    };
    CHECK(ct_device_cpu.encode(NULL, &e, NULL) == CT_OK);
}

static void
decode(coded *c)
{
    const ct_decoding d = {
        .values = {c->decoded, N, CT_F32},
        .quantized = c->quantized,
        .scales = c->scales,
        .parts = 1,
        .factor = 1.0f,
        .bits = c->bits
    };
    CHECK(ct_device_cpu.decode(NULL, &d, NULL) == CT_OK);
}

/* Half a scale and the roundings of x * inverse and of value * scale, each of at most
 * 2**-24 of the largest value. */
static void
check_bound(int bits)
{
    const coded before = example(bits);
    coded c = before;
    encode(&c);
    decode(&c);
    for (size_t i = 0; i < N; i++) {
        const float wanted = before.values[i] + before.residual[i];
        const float largest =
            c.scales[i / CT_QUANTIZED_BLOCK] * ct_quantized_most(bits);
        const float bound =
            c.scales[i / CT_QUANTIZED_BLOCK] / 2.0f + largest * 0x1p-22f;
        CHECK(largest < 2.02f && fabsf(c.decoded[i] - wanted) <= bound);
        CHECK(c.residual[i] == wanted - c.decoded[i]);
    }
}

static void
test_a_code_misses_half_a_scale_at_most_which_is_remembered(void)
{
    check_bound(8);
    check_bound(4);
}

/* A constant arrives as it is on average: what all rounds have missed together is what
 * the last one has left, at most half a scale. */
static void
test_what_is_remembered_makes_up_for_what_was_missed(void)
{
    coded c = example(4);
    double sum[N] = {0};
    memset(c.residual, 0, sizeof c.residual);
    for (int round = 0; round < 64; round++) {
        encode(&c);
        decode(&c);
        for (size_t i = 0; i < N; i++) {
            sum[i] += (double)c.decoded[i];
        }
    }
    for (size_t i = 0; i < N; i++) {
        /* scales are of 2.0 + half a scale at most: 2.0 / 6.5; roundings 64 * 2**-22 */
        CHECK(fabs(sum[i] - 64.0 * (double)c.values[i]) <= 0.5 * 2.0 / 6.5 + 0x1p-16);
    }
}

static void
test_two_codes_of_4_bits_share_a_byte(void)
{
    for (int first = -7; first <= 7; first++) {
        for (int second = -7; second <= 7; second++) {
            const int8_t pair = ct_quantized_pair((int8_t)first, (int8_t)second);
            CHECK(ct_quantized_first(pair) == first &&
                  ct_quantized_second(pair) == second);
        }
    }
    CHECK(ct_quantized_bytes(N, 4) == N / 2 + 1 && ct_quantized_bytes(N, 8) == N);
    coded c = example(4);
    memset(c.quantized, 0x5a, sizeof c.quantized);
    encode(&c);
    CHECK(c.quantized[N / 2 + 1] == 0x5a); /* nothing behind the last */
    CHECK(ct_quantized_second(c.quantized[N / 2]) == 0);
}

static void
test_a_nan_makes_its_block_nan_and_is_not_remembered(void)
{
    const coded before = example(4);
    coded c = before;
    c.values[300] = NAN;
    encode(&c);
    decode(&c);
    for (size_t i = 0; i < N; i++) {
        CHECK(isnan(c.decoded[i]) == (i / CT_QUANTIZED_BLOCK == 1));
        CHECK(i / CT_QUANTIZED_BLOCK != 1 || c.residual[i] == before.residual[i]);
    }
}

static void
check_sets(int bits)
{
    static const char *const sets[] = {"base", "v3", "v4"};
    coded expected = example(bits);
    CHECK(ct_cpu_set_isa("base", NULL) == CT_OK);
    encode(&expected);
    decode(&expected);
    for (size_t s = 1; s < 3; s++) {
        coded c = example(bits);
        if (ct_cpu_set_isa(sets[s], NULL) == CT_OK) {
            encode(&c);
            decode(&c);
            CHECK(memcmp(&c, &expected, sizeof c) == 0);
        }
    }
    CHECK(ct_cpu_set_isa(NULL, NULL) == CT_OK);
}

static void
test_every_instruction_set_writes_the_same(void)
{
    check_sets(8);
    check_sets(4);
}

int
main(void)
{
    test_a_code_misses_half_a_scale_at_most_which_is_remembered();
    test_what_is_remembered_makes_up_for_what_was_missed();
    test_two_codes_of_4_bits_share_a_byte();
    test_a_nan_makes_its_block_nan_and_is_not_remembered();
    test_every_instruction_set_writes_the_same();
    return 0;
}
