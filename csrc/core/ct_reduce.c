#include "core/ct_reduce.h"

#include "math/ct_half_math.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    TILE = 512 /* elements: their sums stay in a core's first cache */
};

static inline double
combine_floats(double a, double b, ct_reduce_op op)
{
    switch (op) {
    case CT_REDUCE_MAX:
        return b > a || isnan(b) ? b : a;
    case CT_REDUCE_MIN:
        return b < a || isnan(b) ? b : a;
    case CT_REDUCE_SUM:
    case CT_REDUCE_MEAN:
        break;
    }
    return a + b;
}

static inline double
divide_floats(double sum, size_t n)
{
    return sum / (double)n;
}

static inline int64_t
combine_integers(int64_t a, int64_t b, ct_reduce_op op)
{
    switch (op) {
    case CT_REDUCE_MAX:
        return b > a ? b : a;
    case CT_REDUCE_MIN:
        return b < a ? b : a;
    case CT_REDUCE_SUM:
    case CT_REDUCE_MEAN:
        break;
    }
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

static inline int64_t
divide_integers(int64_t sum, size_t n)
{
    return sum / (int64_t)n;
}

#define AS_IS(x) (x)
#define AS_F32(x) ((float)(x))
#define AS_I64(x) ((int64_t)(x))
#define AS_I32(x) ((int32_t)(x))
#define AS_I16(x) ((int16_t)(x))
#define AS_I8(x) ((int8_t)(x))
#define AS_U8(x) ((uint8_t)(x))
#define AS_BOOL(x) ((x) != 0)

/* One function for each dtype: how an element is stored, the type that it is reduced
 * in, and the way from one to the other and back. */
#define EACH_DTYPE(X)                                                                  \
    X(CT_F32, float, double, floats, AS_IS, AS_F32)                                    \
    X(CT_F64, double, double, floats, AS_IS, AS_IS)                                    \
    X(CT_BF16, uint16_t, double, floats, ct_f32_from_bf16, ct_bf16_from_f64)           \
    X(CT_F16, uint16_t, double, floats, ct_f32_from_f16, ct_f16_from_f64)              \
    X(CT_I64, int64_t, int64_t, integers, AS_IS, AS_IS)                                \
    X(CT_I32, int32_t, int64_t, integers, AS_IS, AS_I32)                               \
    X(CT_I16, int16_t, int64_t, integers, AS_IS, AS_I16)                               \
    X(CT_I8, int8_t, int64_t, integers, AS_I64, AS_I8)                                 \
    X(CT_U8, uint8_t, int64_t, integers, AS_IS, AS_U8)                                 \
    X(CT_BOOL, bool, int64_t, integers, AS_IS, AS_BOOL)

/* Rows are taken a tile at a time: each loop has one operation and one dtype, so that
 * compilers vectorise it. */
#define FOLD(family, load, op)                                                         \
    for (size_t i = 0; i < n; i++) {                                                   \
        sums[i] = combine_##family(sums[i], load(row[i]), op);                         \
    }
#define DEFINE(dtype, type, wide, family, load, store)                                 \
    static void fold_##dtype(wide sums[], const type row[], size_t n, ct_reduce_op op) \
    {                                                                                  \
        if (op == CT_REDUCE_MAX) {                                                     \
            FOLD(family, load, CT_REDUCE_MAX)                                          \
        }                                                                              \
        else if (op == CT_REDUCE_MIN) {                                                \
            FOLD(family, load, CT_REDUCE_MIN)                                          \
        }                                                                              \
        else {                                                                         \
            FOLD(family, load, CT_REDUCE_SUM)                                          \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    static void tile_##dtype(type out[], const void *const *in, size_t n_in,           \
                             size_t at, size_t n, ct_reduce_op op)                     \
    {                                                                                  \
        wide sums[TILE];                                                               \
        for (size_t i = 0; i < n; i++) {                                               \
            sums[i] = load(((const type *)in[0])[at + i]);                             \
        }                                                                              \
        for (size_t r = 1; r < n_in; r++) {                                            \
            fold_##dtype(sums, (const type *)in[r] + at, n, op);                       \
        }                                                                              \
        for (size_t i = 0; op == CT_REDUCE_MEAN && i < n; i++) {                       \
            sums[i] = divide_##family(sums[i], n_in);                                  \
        }                                                                              \
        for (size_t i = 0; i < n; i++) {                                               \
            out[at + i] = store(sums[i]);                                              \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    static void reduce_##dtype(void *out, const void *const *in, size_t n_in,          \
                               size_t n, ct_reduce_op op)                              \
    {                                                                                  \
        for (size_t at = 0; at < n; at += TILE) {                                      \
            tile_##dtype(out, in, n_in, at, n - at < TILE ? n - at : TILE, op);        \
        }                                                                              \
    }
EACH_DTYPE(DEFINE)
#undef DEFINE
#undef FOLD

/* The sum of two floats is that of doubles, rounded twice, which changes nothing: a
 * double has more than twice a float's bits and two (Figueroa, "When is double rounding
 * innocuous?", 1995). So a float has of the 16-bit types', of which float16 has 11. */
#define ADD_TWO(dtype, type, load, store)                                              \
    static void add_two_##dtype(void *out, const void *a, const void *b, size_t n)     \
    {                                                                                  \
        for (size_t i = 0; i < n; i++) {                                               \
            const float x = load(((const type *)a)[i]);                                \
            const float y = load(((const type *)b)[i]);                                \
            ((type *)out)[i] = store(x + y);                                           \
        }                                                                              \
    }
ADD_TWO(CT_F32, float, AS_IS, AS_IS)
ADD_TWO(CT_BF16, uint16_t, ct_f32_from_bf16, ct_bf16_from_f32)
ADD_TWO(CT_F16, uint16_t, ct_f32_from_f16, ct_f16_from_f32)
#undef ADD_TWO

typedef void add_two_fn(void *out, const void *a, const void *b, size_t n);

/* NULL where that is not known to be the same. */
static add_two_fn *
add_two_of(ct_dtype dtype)
{
    switch (dtype) {
    case CT_F32:
        return add_two_CT_F32;
    case CT_BF16:
        return add_two_CT_BF16;
    case CT_F16:
        return add_two_CT_F16;
    default:
        return NULL;
    }
}

void
ct_reduce(void *out, const void *const *in, size_t n_in, size_t n, ct_dtype dtype,
          ct_reduce_op op)
{
    if (n_in == 2 && op == CT_REDUCE_SUM && add_two_of(dtype) != NULL) {
        add_two_of(dtype)(out, in[0], in[1], n);
        return;
    }
    switch (dtype) {
#define CALL(dtype, type, wide, family, load, store)                                   \
    case dtype:                                                                        \
        reduce_##dtype(out, in, n_in, n, op);                                          \
        return;
        EACH_DTYPE(CALL)
#undef CALL
    case CT_DTYPE_COUNT:
        return;
    }
}
