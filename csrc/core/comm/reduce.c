/* Tiles of the operands are converted, combined in a wider type, and rounded back; each
 * body is compiled for three instruction sets, with the same bits. */
#include "core/comm/reduce.h"

#include "core/base/span.h"
#include "math/half.h"

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

/* Of a power of two the reciprocal is exact, and so is the product. */
static inline double
divide_floats(double sum, size_t n)
{
    return (n & (n - 1)) == 0 ? sum * (1.0 / (double)n) : sum / (double)n;
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

/* For each dtype: the type of a stored element, the type of the reduction, and the
 * conversions between the two. */
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

/* All loops are compiled for each instruction set and chosen at run time; the results
 * have the same bits. GCC inlines functions compiled for the base across a list of
 * features, but not across an arch=. */
#define CT_SET base
#include "core/comm/reduce_body.h"
#undef CT_SET
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAVE_X86_LEVELS 1
#pragma GCC push_options
#pragma GCC target("sse4.2,popcnt,avx,avx2,bmi,bmi2,f16c,fma,lzcnt,movbe")
#define CT_SET v3
#include "core/comm/reduce_body.h"
#undef CT_SET
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl")
#pragma GCC target("prefer-vector-width=512")
#define CT_SET v4
#include "core/comm/reduce_body.h"
#undef CT_SET
#pragma GCC pop_options
#endif

size_t
ct_reduce_sets(ct_reduce_fn *sets[CT_REDUCE_MOST_SETS])
{
    size_t n = 0;
    sets[n++] = reduce_base;
#ifdef HAVE_X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v3")) {
        sets[n++] = reduce_v3;
    }
    if (__builtin_cpu_supports("x86-64-v4")) {
        sets[n++] = reduce_v4;
    }
#endif
    return n;
}

void
ct_reduce(void *out, const void *const *in, size_t n_in, size_t n, ct_dtype dtype,
          ct_reduce_op op)
{
    ct_reduce_fn *sets[CT_REDUCE_MOST_SETS];
    sets[ct_reduce_sets(sets) - 1](out, in, n_in, n, dtype, op);
}
