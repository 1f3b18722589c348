/* The update of many parameters by one rule: operands of the device table's `update`,
 * and, at the end, of `factor_sums` and `factor`.
 *
 * The rule computes in fp64 for F64 parameters and in fp32 for all others. The arrays
 * may differ in dtype: fp16 gradients beside an fp32 master copy, bf16 parameters
 * with fp32 state; the state may also be quantized to 8 bits, in one of two formats.
 * The same pass writes the new parameter to a copy of lower precision and into an
 * exponential moving average. */
#ifndef CT_UPDATE_H
#define CT_UPDATE_H

#include "core/base/span.h"
#include "core/base/status.h"
#include "math/clip.h"
#include "math/quant.h"
#include "math/rules.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

/* Selects the random bits of stochastic rounding: Philox with `seed` as the key, `step`
 * and the element's number as the counter. */
typedef struct ct_rounding {
    uint64_t seed, step;
} ct_rounding;

/* Element i of state that is U8 is map[state[i]] * absmax[i / CT_QUANT_BLOCK]. A
 * state_dtype of I8 stands for compact state (math/compact.h): state[0] is int8, of
 * momenta, state[1] uint8, and the scale of element i is scales[i / CT_COMPACT_GROUP].
 */
typedef struct ct_quant {
    const float *map; /* CT_QUANT_MAP_SIZE values, ascending */
    union {
        float *absmax;
        uint16_t *scales; /* float16 */
    };
} ct_quant;

/* Parallel arrays of n elements in the memory of a device, without overlap. Borrowed:
 * the maker of the span keeps them alive until the stream has drained. */
typedef struct ct_update_span {
    size_t n;
    void *grad; /* read; zeroed when the update asks for it */
    void *param;
    void *state[CT_RULE_MAX_STATES];    /* as many as the rule has */
    ct_quant quant[CT_RULE_MAX_STATES]; /* of state that is U8 or I8 */
    /* Unless NULL, `param` is BF16, the state is I8 and the rule reads and writes
     * master weights, param[i] and correction[i] together. */
    int8_t *correction;
    void *copy; /* gets the new parameter; or NULL */
    /* becomes ema * ema_decay + x * (1 - ema_decay), x being the new copy, or without a
     * copy the new parameter; or NULL */
    void *ema;
    ct_dtype dtype, grad_dtype, state_dtype, copy_dtype, ema_dtype;
    uint32_t coef; /* index into the update's list of constants */
    const ct_rule_coef
        *settled; /* unless NULL: the constants, in the device's memory */
    /* For rules that use whole parameters: the span is elements [begin, begin + n) of
     * `whole`; 0: all of the parameter. */
    size_t begin, whole;
    /* Shape of the consecutive matrices in the parameter, for rules that need it. */
    size_t rows, cols;
    /* Unless NULL, state[0] is not stored but row[b][i] * col[b][j] in matrix b. Both
     * arrays have the type of ct_update_real(). */
    const void *row, *col;
    void *rms; /* Adafactor's root mean square of the parameter, of the type of
                * ct_update_real(); written by the device table's `settle`; or NULL */
    /* Unless NULL, values for BF16 `param` or `copy` are rounded up or down at random,
     * in proportion to nearness. `first` is the number of element 0 among all
     * elements of the key and the step. */
    const ct_rounding *rounding;
    uint64_t first;
} ct_update_span;

/* The type of the computation. */
static inline ct_dtype
ct_update_real(const ct_update_span *span)
{
    return span->dtype == CT_F64 ? CT_F64 : CT_F32;
}

/* Number of elements of the span's whole parameter. */
static inline size_t
ct_update_whole(const ct_update_span *span)
{
    return span->whole != 0 ? span->whole : span->n;
}

/* Writes the settled root mean square to `rms` unless NULL. */
CT_HD static inline void
ct_update_keep_rms(void *rms, ct_dtype real, const ct_rule_coef *settled)
{
    if (rms != NULL && real == CT_F64) {
        *(double *)rms = settled->adafactor.rms;
    }
    else if (rms != NULL) {
        *(float *)rms = (float)settled->adafactor.rms;
    }
}

typedef struct ct_update {
    ct_rule rule;
    const ct_rule_coef *coefs;
    const ct_update_span *spans;
    size_t n_spans;
    bool zero_grads;
    double ema_decay; /* in [0, 1] */
    /* Unless NULL, in the device's memory: coef is another factor of every gradient,
     * and with `skip` no parameter, state or gradient is written. */
    const ct_clip_outcome *clip;
} ct_update;

/* CT_EINVAL names the first span with dtypes or arrays unfit for the rule. For the
 * kernels of every device. */
CT_NODISCARD ct_status ct_update_check(const ct_update *update, ct_error *err);

/* CT_EINVAL names the first pair of spans and values unfit for `average` and `add` of
 * the device table. */
CT_NODISCARD ct_status ct_check_pairs(const char *kernel, const ct_span *spans,
                                      const ct_span *values, size_t n_spans,
                                      ct_error *err);

/* ct_update_check() for `measure`: the rule must be a measured one. */
CT_NODISCARD ct_status ct_measure_check(const ct_update *update, ct_error *err);

size_t ct_rule_n_states(ct_rule rule);

/* ---- averages of squares by row and by column ------------------------------------ */

/* A list of matrices of rows x cols, one behind the other, whose averages of squares
 * are kept by row and by column: row[b][i] and col[b][j]. Factors are of the type that
 * is computed in. */
typedef struct ct_factored {
    size_t matrices, rows, cols; /* each > 0 */
    size_t begin, n; /* the gradient is elements [begin, begin + n) of the list */
    const void *grad;
    double *sums; /* of squares: [matrices][rows], and behind them [matrices][cols] */
    void *row, *col;  /* become x * decay + (1 - decay) * (mean of squares + eps) */
    void *row_factor; /* becomes 1 / sqrt(row / mean of the matrix's rows) */
    void *col_factor; /* becomes 1 / sqrt(col) */
    ct_dtype grad_dtype, state_dtype, real;
    double grad_scale, decay, eps;
    const ct_clip_outcome *clip; /* as in ct_update */
} ct_factored;

/* How many sums there are. */
static inline size_t
ct_factored_n_sums(const ct_factored *f)
{
    return f->matrices * (f->rows + f->cols);
}

/* CT_EINVAL names the first whose shape or dtypes do not fit. For the kernels of every
 * device. */
CT_NODISCARD ct_status ct_factor_check(const ct_factored *list, size_t n,
                                       ct_error *err);

CT_END_DECLS

#endif
