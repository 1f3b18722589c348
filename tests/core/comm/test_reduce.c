#include "core/comm/reduce.h"
#include "ct_random.h"
#include "ct_kernels.h"
#include "ct_test.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static double
reduced(ct_dtype dtype, const double *values, size_t n_in, ct_reduce_op op)
{
    double cells[4] = {0}, out = 0;
    const void *in[4];
    for (size_t r = 0; r < n_in; r++) {
        ct_store(dtype, &cells[r], 0, values[r]);
        in[r] = &cells[r];
    }
    ct_reduce(&out, in, n_in, 1, dtype, op);
    return ct_load(dtype, &out, 0);
}

static void
test_floats_of_every_width(void)
{
    static const ct_dtype dtypes[] = {CT_F32, CT_F64, CT_BF16, CT_F16};
    static const double values[] = {1.0, -2.0, 5.0, 2.0};
    for (size_t i = 0; i < 4; i++) {
        CHECK(reduced(dtypes[i], values, 4, CT_REDUCE_SUM) == 6.0);
        CHECK(reduced(dtypes[i], values, 4, CT_REDUCE_MEAN) == 1.5);
        CHECK(reduced(dtypes[i], values, 4, CT_REDUCE_MAX) == 5.0);
        CHECK(reduced(dtypes[i], values, 4, CT_REDUCE_MIN) == -2.0);
        CHECK(reduced(dtypes[i], values, 1, CT_REDUCE_MEAN) == 1.0);
    }
}

static void
test_floats_are_added_in_order_in_double_and_rounded_once(void)
{
    static const double wide[] = {1e16, 1.0, -1e16, 1.0}; /* 1e16 + 1 is 1e16 */
    CHECK(reduced(CT_F64, wide, 4, CT_REDUCE_SUM) == 1.0);
    static const double narrow[] = {0x1p24, 1.0, -0x1p24, 1.0};
    CHECK(reduced(CT_F32, narrow, 4, CT_REDUCE_SUM) == 2.0);
    static const double half[] = {2048.0, 1.0, 1.0, 1.0}; /* f16: 2 apart from 2048 */
    CHECK(reduced(CT_F16, half, 4, CT_REDUCE_SUM) == 2052.0); /* 2051, ties to even */
}

static void
test_a_nan_stays_wherever_it_is(void)
{
    double values[] = {NAN, 1.0, 2.0};
    for (size_t at = 0; at < 3; at++) {
        values[0] = values[1] = values[2] = 1.0;
        values[at] = NAN;
        CHECK(isnan(reduced(CT_F64, values, 3, CT_REDUCE_MAX)));
        CHECK(isnan(reduced(CT_F32, values, 3, CT_REDUCE_MIN)));
        CHECK(isnan(reduced(CT_BF16, values, 3, CT_REDUCE_SUM)));
    }
}

/* Two are added by another loop than three, of which the third changes nothing. */
static void
check_two_of(ct_dtype dtype, uint16_t b)
{
    enum {
        ALL = 1 << 16
    };
    static uint16_t a[ALL], other[ALL], zeros[ALL], two[ALL], three[ALL];
    const void *rows[] = {a, other, zeros};
    for (size_t i = 0; i < ALL; i++) {
        a[i] = (uint16_t)i;
        other[i] = b;
        zeros[i] = 0x8000u; /* -0 */
    }
    ct_reduce(two, rows, 2, ALL, dtype, CT_REDUCE_SUM);
    ct_reduce(three, rows, 3, ALL, dtype, CT_REDUCE_SUM);
    for (size_t i = 0; i < ALL; i++) {
        CHECK(two[i] == three[i] ||
              (isnan(ct_load(dtype, two, i)) && isnan(ct_load(dtype, three, i))));
    }
}

static void
test_two_16_bit_floats_are_added_with_the_same_bits(void)
{
    for (unsigned b = 0; b < 1u << 16; b += 257) {
        check_two_of(CT_BF16, (uint16_t)b);
        check_two_of(CT_F16, (uint16_t)b);
    }
}

/* Halves of an ulp, powers of two apart, sums that cancel and that overflow. */
static void
test_two_floats_are_added_with_the_same_bits(void)
{
    static const float some[] = {1.0f,     -1.0f,     0x1p-24f,        0x1.8p-24f,
                                 0x1p-25f, 0x1p-149f, 0x1.fffffep127f, 0x1p103f,
                                 0x1p-53f, 3.3e-5f,   -0x1.000002p0f,  0.0f};
    const float zero = -0.0f;
    for (size_t i = 0; i < 12; i++) {
        for (size_t k = 0; k < 12; k++) {
            const void *rows[] = {&some[i], &some[k], &zero};
            float two, three;
            ct_reduce(&two, rows, 2, 1, CT_F32, CT_REDUCE_SUM);
            ct_reduce(&three, rows, 3, 1, CT_F32, CT_REDUCE_SUM);
            CHECK(memcmp(&two, &three, sizeof two) == 0);
        }
    }
}

static void
fill_with_noise(void *data, size_t bytes, uint64_t seed)
{
    ct_random r = {seed};
    for (size_t i = 0; i < bytes; i++) {
        ((unsigned char *)data)[i] = (unsigned char)ct_random_below(&r, 256);
    }
}

/* What is a NaN may be another one. */
static bool
is_same(ct_dtype dtype, const void *a, const void *b, size_t i)
{
    const size_t item = ct_dtype_size(dtype);
    const char *x = (const char *)a + i * item, *y = (const char *)b + i * item;
    return memcmp(x, y, item) == 0 ||
           (ct_dtype_is_float(dtype) && isnan(ct_load(dtype, a, i)) &&
            isnan(ct_load(dtype, b, i)));
}

static void
check_sets_on(ct_dtype dtype, size_t n_in, ct_reduce_op op)
{
    enum {
        N = 1061,
        MOST = 5
    };
    static _Alignas(16) unsigned char in[MOST][N * 8], first[N * 8], out[N * 8];
    const void *rows[MOST];
    ct_reduce_fn *sets[CT_REDUCE_MOST_SETS];
    for (size_t r = 0; r < n_in; r++) {
        fill_with_noise(in[r], sizeof in[r], 77 * r + (uint64_t)dtype + 1);
        for (size_t i = 0; dtype == CT_BOOL && i < N; i++) {
            in[r][i] &= 1;
        }
        rows[r] = in[r];
    }
    const size_t n_sets = ct_reduce_sets(sets);
    sets[0](first, rows, n_in, N, dtype, op);
    for (size_t s = 1; s < n_sets; s++) {
        sets[s](out, rows, n_in, N, dtype, op);
        for (size_t i = 0; i < N; i++) {
            CHECK(is_same(dtype, first, out, i));
        }
    }
}

static void
test_every_instruction_set_gives_the_same_bits(void)
{
    for (int dtype = 0; dtype < CT_DTYPE_COUNT; dtype++) {
        for (int op = CT_REDUCE_SUM; op <= CT_REDUCE_MIN; op++) {
            for (size_t n_in = 1; n_in <= 5; n_in++) {
                check_sets_on((ct_dtype)dtype, n_in, (ct_reduce_op)op);
            }
        }
    }
}

/* As double has it, where the sum is none of the type. */
static void
test_means_do_not_overflow(void)
{
    const float large[] = {0x1.fffffep127f, 0x1.8p127f};
    const void *rows[] = {&large[0], &large[1]};
    float mean;
    ct_reduce(&mean, rows, 2, 1, CT_F32, CT_REDUCE_MEAN);
    CHECK(mean == (float)(((double)large[0] + (double)large[1]) / 2.0));
    const double halves[] = {60000.0, 65000.0};
    CHECK(reduced(CT_F16, halves, 2, CT_REDUCE_MEAN) == 62496.0); /* 62500, nearest */
    const double thirds[] = {1.0, 1.0, 2.0};
    CHECK(reduced(CT_F64, thirds, 3, CT_REDUCE_MEAN) == 4.0 / 3.0);
}

#define CHECK_INTEGERS(dtype, type, sum)                                               \
    do {                                                                               \
        const type rows[3][2] = {                                                      \
            {7, (type) - 1}, \
            {1, 3         }, \
            {2, 2         } \
        };                                          \
        const void *in[] = {rows[0], rows[1], rows[2]};                                \
        type out[2];                                                                   \
        ct_reduce(out, in, 3, 2, dtype, CT_REDUCE_SUM);                                \
        CHECK(out[0] == 10 && out[1] == (type)(sum));                                  \
        ct_reduce(out, in, 3, 2, dtype, CT_REDUCE_MEAN);                               \
        CHECK(out[0] == 3 && out[1] == (type)((sum) / 3));                             \
        ct_reduce(out, in, 3, 2, dtype, CT_REDUCE_MAX);                                \
        CHECK(out[0] == 7 && out[1] == ((type) - 1 > 0 ? (type) - 1 : 3));             \
        ct_reduce(out, in, 3, 2, dtype, CT_REDUCE_MIN);                                \
        CHECK(out[0] == 1 && out[1] == ((type) - 1 > 0 ? 2 : (type) - 1));             \
    } while (0)

static void
test_integers_of_every_width(void)
{
    CHECK_INTEGERS(CT_I64, int64_t, 4);
    CHECK_INTEGERS(CT_I32, int32_t, 4);
    CHECK_INTEGERS(CT_I16, int16_t, 4);
    CHECK_INTEGERS(CT_I8, int8_t, 4);
    CHECK_INTEGERS(CT_U8, uint8_t, 255 + 3 + 2);
    const int64_t large[] = {INT64_MAX, 1};
    const void *in[] = {&large[0], &large[1]};
    int64_t wrapped;
    ct_reduce(&wrapped, in, 2, 1, CT_I64, CT_REDUCE_SUM);
    CHECK(wrapped == INT64_MIN);
}

static void
test_bools_say_any_or_all(void)
{
    const bool rows[2][3] = {
        {true, false, true },
        {true, false, false}
    };
    const void *in[] = {rows[0], rows[1]};
    static const ct_reduce_op any[] = {CT_REDUCE_SUM, CT_REDUCE_MAX};
    static const ct_reduce_op all[] = {CT_REDUCE_MEAN, CT_REDUCE_MIN};
    for (size_t i = 0; i < 2; i++) {
        bool out[3];
        ct_reduce(out, in, 2, 3, CT_BOOL, any[i]);
        CHECK(out[0] && !out[1] && out[2]);
        ct_reduce(out, in, 2, 3, CT_BOOL, all[i]);
        CHECK(out[0] && !out[1] && !out[2]);
    }
}

static void
test_the_result_may_replace_one_of_the_rows(void)
{
    float rows[3][2] = {
        {1.0f, 2.0f},
        {3.0f, 4.0f},
        {5.0f, 6.0f}
    };
    const void *in[] = {rows[0], rows[1], rows[2]};
    ct_reduce(rows[1], in, 3, 2, CT_F32, CT_REDUCE_SUM);
    CHECK(rows[1][0] == 9.0f && rows[1][1] == 12.0f);
    CHECK(rows[0][0] == 1.0f && rows[2][1] == 6.0f);
}

int
main(void)
{
    test_two_16_bit_floats_are_added_with_the_same_bits();
    test_two_floats_are_added_with_the_same_bits();
    test_floats_of_every_width();
    test_floats_are_added_in_order_in_double_and_rounded_once();
    test_a_nan_stays_wherever_it_is();
    test_every_instruction_set_gives_the_same_bits();
    test_means_do_not_overflow();
    test_integers_of_every_width();
    test_bools_say_any_or_all();
    test_the_result_may_replace_one_of_the_rows();
    return 0;
}
