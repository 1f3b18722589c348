#include "core/ct_reduce.h"

#include "math/ct_half_math.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

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

#define DEFINE(dtype, type, wide, family, load, store)                                 \
    static void reduce_##dtype(void *out, const void *const *in, size_t n_in,          \
                               size_t n, ct_reduce_op op)                              \
    {                                                                                  \
        for (size_t i = 0; i < n; i++) {                                               \
            wide value = load(((const type *)in[0])[i]);                               \
            for (size_t r = 1; r < n_in; r++) {                                        \
                value = combine_##family(value, load(((const type *)in[r])[i]), op);   \
            }                                                                          \
            value = op == CT_REDUCE_MEAN ? divide_##family(value, n_in) : value;       \
            ((type *)out)[i] = store(value);                                           \
        }                                                                              \
    }
EACH_DTYPE(DEFINE)
#undef DEFINE

void
ct_reduce(void *out, const void *const *in, size_t n_in, size_t n, ct_dtype dtype,
          ct_reduce_op op)
{
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
