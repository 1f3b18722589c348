/* The update of many parameters by one rule: operands of the device table's `update`.
 *
 * The rule computes in fp64 where the parameter is F64 and in fp32 everywhere else.
 * Each array may have a float dtype of its own: 16-bit gradients beside an fp32 master
 * copy, 16-bit parameters with fp32 state; the state may also be 8-bit values. In
 * the same pass the new parameter goes to a copy of lower precision and into an
 * exponential moving average. */
#ifndef CT_UPDATE_H
#define CT_UPDATE_H

#include "core/base/span.h"
#include "core/base/status.h"
#include "math/quant.h"
#include "math/rules.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Keys the random bits of stochastic rounding: Philox, with `seed` as its key, and
 * `step` and an element's number as its counter. */
typedef struct ct_rounding {
    uint64_t seed, step;
} ct_rounding;

/* Element i of state that is U8 is map[state[i]] * absmax[i / CT_QUANT_BLOCK]. */
typedef struct ct_quant {
    const float *map; /* CT_QUANT_CODES of them, ascending */
    float *absmax;
} ct_quant;

/* Parallel arrays of n elements in one device's memory, which do not overlap.
 * Borrowed: whoever fills the span keeps them alive until the stream has drained. */
typedef struct ct_update_span {
    size_t n;
    void *grad; /* read; zeroed when the update asks for it */
    void *param;
    void *state[CT_RULE_MAX_STATES];    /* as many as the rule has */
    ct_quant quant[CT_RULE_MAX_STATES]; /* of the state, where state_dtype is U8 */
    void *copy;                         /* gets the new parameter; or NULL */
    /* gets ema * ema_decay + x * (1 - ema_decay), x being the new copy, or the new
     * parameter where there is no copy; or NULL */
    void *ema;
    ct_dtype dtype, grad_dtype, state_dtype, copy_dtype, ema_dtype;
    uint32_t coef;               /* index into the update's list of constants */
    const ct_rule_coef *settled; /* the device's, in place of that; or NULL */
    /* Which elements of a parameter these are, where a rule looks at a whole one: from
     * `begin` on, of `whole`; 0: of n, which are all. */
    size_t begin, whole;
    /* What the whole is a list of, one behind the other, where that matters. */
    size_t rows, cols;
    /* Unless NULL, state[0] is not stored: in matrix b it is row[b][i] * col[b][j].
     * Both are arrays of the type that is computed in. */
    const void *row, *col;
    /* Unless NULL, what is stored as BF16 in `param` or `copy` is rounded up or down at
     * random, in proportion to what lies below. `first` is the number of element 0
     * among all that share the key and the step: a multiple of 8. */
    const ct_rounding *rounding;
    uint64_t first;
} ct_update_span;

/* The type that a parameter is computed in. */
static inline ct_dtype
ct_update_real(const ct_update_span *span)
{
    return span->dtype == CT_F64 ? CT_F64 : CT_F32;
}

/* Elements of the parameter that the span is a part of. */
static inline size_t
ct_update_whole(const ct_update_span *span)
{
    return span->whole != 0 ? span->whole : span->n;
}

typedef struct ct_update {
    ct_rule rule;
    const ct_rule_coef *coefs;
    const ct_update_span *spans;
    size_t n_spans;
    bool zero_grads;
    double ema_decay; /* in [0, 1] */
} ct_update;

/* CT_EINVAL names the first span whose dtypes or arrays do not fit the rule. For the
 * kernels of every device. */
CT_NODISCARD ct_status ct_update_check(const ct_update *update, ct_error *err);

/* CT_EINVAL names the first pair that a kernel cannot work on which brings values into
 * spans: `average` and `add` of the device table. */
CT_NODISCARD ct_status ct_check_pairs(const char *kernel, const ct_span *spans,
                                      const ct_span *values, size_t n_spans,
                                      ct_error *err);
/* The same for `measure`, whose rule has to be a measured one. */
CT_NODISCARD ct_status ct_measure_check(const ct_update *update, ct_error *err);

const char *ct_rule_name(ct_rule rule);
size_t ct_rule_n_states(ct_rule rule);

#ifdef __cplusplus
}
#endif

#endif
