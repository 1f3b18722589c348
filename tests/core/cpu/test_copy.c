#include "core/base/alloc.h"
#include "ct_kernels.h"
#include "ct_random.h"

#include <math.h>
#include <string.h>

enum {
    GUARD = 3 /* elements on either side that must stay as they were */
};

static const ct_dtype floats[] = {CT_F32, CT_F64, CT_BF16, CT_F16};

typedef struct pair {
    ct_span from, to, expected;
    void *blocks[3];
} pair;

static ct_span
span_make(void **block, size_t n, ct_dtype dtype)
{
    const size_t size = ct_dtype_size(dtype);
    *block = ct_alloc((n + 2 * GUARD) * size);
    memset(*block, 0x33, (n + 2 * GUARD) * size);
    return (ct_span){(char *)*block + GUARD * size, n, dtype};
}

/* A value that the source holds, among them some that the target cannot hold. */
static double
random_value(ct_random *r)
{
    static const double special[] = {0.0,    -0.0,   INFINITY, -INFINITY, 65504.0,
                                     65520., 1e-7,   6e-8,     1e-45,     1e30,
                                     3e-5,   1.0005, -2.5,     0x1p-149,  1e300};
    const size_t kind = ct_random_below(r, 40);
    return kind < 15 ? special[kind] : 100.0 * ct_random_unit(r);
}

static pair
pair_make(ct_random *r, size_t n, ct_dtype from, ct_dtype to)
{
    pair p;
    p.from = span_make(&p.blocks[0], n, from);
    p.to = span_make(&p.blocks[1], n, to);
    p.expected = span_make(&p.blocks[2], n, to);
    for (size_t i = 0; i < n; i++) {
        ct_store(from, p.from.data, i, random_value(r));
        ct_store(to, p.expected.data, i, ct_load(from, p.from.data, i));
    }
    return p;
}

static void
pair_free(pair *p)
{
    for (int k = 0; k < 3; k++) {
        ct_free(p->blocks[k]);
    }
}

typedef struct pairs {
    pair list[16];
    ct_span from[16], to[16];
} pairs;

static void
check_copy(void *arg)
{
    const pairs *all = arg;
    for (size_t i = 0; i < 16; i++) {
        const size_t bytes = all->to[i].n * ct_dtype_size(all->to[i].dtype);
        memset(all->to[i].data, 0x33, bytes);
    }
    CHECK(ct_device_cpu.copy(NULL, all->to, all->from, 16, NULL) == CT_OK);
    for (size_t i = 0; i < 16; i++) {
        const size_t elems = all->to[i].n + 2 * GUARD;
        CHECK(memcmp(all->list[i].blocks[1], all->list[i].blocks[2],
                     elems * ct_dtype_size(all->to[i].dtype)) == 0);
    }
}

static void
test_every_pair_of_float_dtypes_is_rounded_to_nearest(void)
{
    static const size_t lengths[] = {0, 1, 511, 512, 513, 100001};
    ct_random r = {11};
    for (size_t round = 0; round < 12; round++) {
        pairs all;
        for (size_t i = 0; i < 16; i++) {
            const size_t n = lengths[ct_random_below(&r, 6)];
            all.list[i] = pair_make(&r, n, floats[i / 4], floats[i % 4]);
            all.from[i] = all.list[i].from;
            all.to[i] = all.list[i].to;
        }
        ct_for_each_setting(check_copy, &all);
        for (size_t i = 0; i < 16; i++) {
            pair_free(&all.list[i]);
        }
    }
}

/* Every half, and floats of every sign and exponent with random fractions, NaNs and
 * subnormals among them: the same bits as the formulas give, on every instruction set,
 * whatever it converts with. */
typedef struct halves {
    uint16_t half[65536], back[65536];
    float wide[65536], value[65536];
    ct_dtype dtype;
} halves;

static void
check_halves(void *arg)
{
    halves *h = arg;
    const bool f16 = h->dtype == CT_F16;
    const ct_span half = {h->half, 65536, h->dtype}, back = {h->back, 65536, h->dtype};
    const ct_span wide = {h->wide, 65536, CT_F32}, value = {h->value, 65536, CT_F32};
    CHECK(ct_device_cpu.copy(NULL, &wide, &half, 1, NULL) == CT_OK);
    CHECK(ct_device_cpu.copy(NULL, &back, &value, 1, NULL) == CT_OK);
    for (size_t i = 0; i < 65536; i++) {
        const float x = h->value[i];
        const float expected =
            f16 ? ct_f32_from_f16(h->half[i]) : ct_f32_from_bf16(h->half[i]);
        const bool nan = isnan(expected);
        CHECK(nan ? isnan(h->wide[i]) != 0
                  : ct_bits_from_f32(h->wide[i]) == ct_bits_from_f32(expected));
        CHECK(h->back[i] == (f16 ? ct_f16_from_f32(x) : ct_bf16_from_f32(x)));
    }
}

static void
test_every_half_is_converted_by_the_formula(void)
{
    halves *h = ct_alloc(sizeof *h);
    ct_random r = {5};
    for (uint32_t i = 0; i < 65536; i++) {
        const uint32_t fraction = (uint32_t)ct_random_below(&r, 1u << 23);
        h->half[i] = (uint16_t)i;
        h->value[i] = ct_f32_from_bits(((i % 512) << 23) | fraction);
    }
    for (int k = 2; k < 4; k++) {
        h->dtype = floats[k];
        ct_for_each_setting(check_halves, h);
    }
    ct_free(h);
}

static void
test_equal_dtypes_are_copied_byte_for_byte(void)
{
    for (int dtype = 0; dtype < CT_DTYPE_COUNT; dtype++) {
        uint8_t from[160], to[160] = {0};
        for (size_t i = 0; i < sizeof from; i++) {
            from[i] = (uint8_t)(255 - i); /* signalling NaNs among them */
        }
        const size_t n = sizeof from / ct_dtype_size((ct_dtype)dtype);
        const ct_span a = {from, n, (ct_dtype)dtype}, b = {to, n, (ct_dtype)dtype};
        CHECK(ct_device_cpu.copy(NULL, &b, &a, 1, NULL) == CT_OK);
        CHECK(memcmp(from, to, sizeof from) == 0);
    }
}

static void
test_nan_stays_nan_in_every_dtype(void)
{
    for (size_t i = 0; i < 16; i++) {
        double from[1], to[1] = {0.0};
        const ct_span a = {from, 1, floats[i / 4]}, b = {to, 1, floats[i % 4]};
        ct_store(a.dtype, from, 0, NAN);
        CHECK(ct_device_cpu.copy(NULL, &b, &a, 1, NULL) == CT_OK);
        CHECK(isnan(ct_load(b.dtype, to, 0)));
    }
}

static void
test_what_cannot_be_converted_is_rejected_before_anything_is_written(void)
{
    float from[2] = {1.0f, 2.0f};
    float to[2] = {0.0f, 0.0f};
    int32_t numbers[2] = {0, 0};
    ct_error err;
    const ct_span source[2] = {
        {from, 2, CT_F32},
        {from, 2, CT_F32}
    };
    const ct_span integers[2] = {
        {to,      2, CT_F32},
        {numbers, 2, CT_I32}
    };
    CHECK(ct_device_cpu.copy(NULL, integers, source, 2, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "copy: span 1 is int32") != NULL && to[0] == 0.0f);

    const ct_span shorter[2] = {
        {to, 2, CT_F32},
        {to, 1, CT_F32}
    };
    CHECK(ct_device_cpu.copy(NULL, shorter, source, 2, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "span 1 has 1 elements to fill from 2") != NULL);
    CHECK(to[0] == 0.0f);
}

int
main(void)
{
    test_every_pair_of_float_dtypes_is_rounded_to_nearest();
    test_every_half_is_converted_by_the_formula();
    test_equal_dtypes_are_copied_byte_for_byte();
    test_nan_stays_nan_in_every_dtype();
    test_what_cannot_be_converted_is_rejected_before_anything_is_written();
    return 0;
}
