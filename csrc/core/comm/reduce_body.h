/* ct_reduce for one instruction set, CT_SET: included once for each by
 * core/comm/reduce.c. */
#define CT_PASTE(name, set) name##_##set
#define CT_PASTE_SET(name, set) CT_PASTE(name, set)
#define CT_OF_SET(name) CT_PASTE_SET(name, CT_SET)

/* Rows are reduced tile by tile: each loop has a single operation and dtype, so that
 * compilers vectorize. */
#define FOLD(family, load, op)                                                         \
    for (size_t i = 0; i < n; i++) {                                                   \
        sums[i] = combine_##family(sums[i], load(row[i]), op);                         \
    }
#define DEFINE(dtype, type, wide, family, load, store)                                 \
    static void CT_OF_SET(fold_##dtype)(wide sums[], const type row[], size_t n,       \
                                        ct_reduce_op op)                               \
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
    static void CT_OF_SET(tile_##dtype)(type out[], const void *const *in,             \
                                        size_t n_in, size_t at, size_t n,              \
                                        ct_reduce_op op)                               \
    {                                                                                  \
        wide sums[TILE];                                                               \
        for (size_t i = 0; i < n; i++) {                                               \
            sums[i] = load(((const type *)in[0])[at + i]);                             \
        }                                                                              \
        for (size_t r = 1; r < n_in; r++) {                                            \
            CT_OF_SET(fold_##dtype)(sums, (const type *)in[r] + at, n, op);            \
        }                                                                              \
        for (size_t i = 0; op == CT_REDUCE_MEAN && i < n; i++) {                       \
            sums[i] = divide_##family(sums[i], n_in);                                  \
        }                                                                              \
        for (size_t i = 0; i < n; i++) {                                               \
            out[at + i] = store(sums[i]);                                              \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    static void CT_OF_SET(reduce_##dtype)(void *out, const void *const *in,            \
                                          size_t n_in, size_t n, ct_reduce_op op)      \
    {                                                                                  \
        for (size_t at = 0; at < n; at += TILE) {                                      \
            CT_OF_SET(tile_##dtype)                                                    \
            (out, in, n_in, at, n - at < TILE ? n - at : TILE, op);                    \
        }                                                                              \
    }
EACH_DTYPE(DEFINE)
#undef DEFINE
#undef FOLD

/* Of two ranks without a tile. The sum of two floats equals the sum of doubles, rounded
 * twice, without a change: a double has more than twice a float's bits and two
 * (Figueroa, "When is double rounding innocuous?", 1995). The same holds for a float
 * and fp16 (11 bits) or bf16. Means are made in double, where no sum overflows. */
#define TWO(dtype, type, real, load, store, store_wide)                                \
    static void CT_OF_SET(add_two_##dtype)(type out[], const type a[], const type b[], \
                                           size_t n)                                   \
    {                                                                                  \
        for (size_t i = 0; i < n; i++) {                                               \
            const real x = load(a[i]), y = load(b[i]);                                 \
            out[i] = store(x + y);                                                     \
        }                                                                              \
    }                                                                                  \
                                                                                       \
    static void CT_OF_SET(mean_two_##dtype)(type out[], const type a[],                \
                                            const type b[], size_t n)                  \
    {                                                                                  \
        for (size_t i = 0; i < n; i++) {                                               \
            const double x = load(a[i]), y = load(b[i]);                               \
            out[i] = store_wide((x + y) * 0.5);                                        \
        }                                                                              \
    }
#define EACH_FLOAT(X)                                                                  \
    X(CT_F32, float, float, AS_IS, AS_IS, AS_F32)                                      \
    X(CT_F64, double, double, AS_IS, AS_IS, AS_IS)                                     \
    X(CT_BF16, uint16_t, float, ct_f32_from_bf16, ct_bf16_from_f32, ct_bf16_from_f64)  \
    X(CT_F16, uint16_t, float, ct_f32_from_f16, ct_f16_from_f32, ct_f16_from_f64)
EACH_FLOAT(TWO)

static void
CT_OF_SET(reduce_two)(void *out, const void *a, const void *b, size_t n, ct_dtype dtype,
                      ct_reduce_op op)
{
    switch (dtype) {
#define CALL(dtype, type, real, load, store, store_wide)                               \
    case dtype:                                                                        \
        (op == CT_REDUCE_SUM ? CT_OF_SET(add_two_##dtype)                              \
                             : CT_OF_SET(mean_two_##dtype))(out, a, b, n);             \
        return;
        EACH_FLOAT(CALL)
#undef CALL
    default:
        return;
    }
}
#undef EACH_FLOAT
#undef TWO

static void
CT_OF_SET(reduce)(void *out, const void *const *in, size_t n_in, size_t n,
                  ct_dtype dtype, ct_reduce_op op)
{
    const bool adds = op == CT_REDUCE_SUM || op == CT_REDUCE_MEAN;
    if (n_in == 2 && adds && ct_dtype_is_float(dtype)) {
        CT_OF_SET(reduce_two)(out, in[0], in[1], n, dtype, op);
        return;
    }
    switch (dtype) {
#define CALL(dtype, type, wide, family, load, store)                                   \
    case dtype:                                                                        \
        CT_OF_SET(reduce_##dtype)(out, in, n_in, n, op);                               \
        return;
        EACH_DTYPE(CALL)
#undef CALL
    case CT_DTYPE_COUNT:
        return;
    }
}
#undef CT_OF_SET
#undef CT_PASTE_SET
#undef CT_PASTE
