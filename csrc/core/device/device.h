/* The device table: one entry per kernel, one table per kind of device.
 *
 * csrc/cpu/NAME.c and cuda/NAME.cu each implement entry NAME over a list of spans; the
 * step engine sees only this table and an opaque stream, so it neither includes nor
 * links CUDA. Work is only enqueued: operands must stay alive until the stream has
 * drained, and no entry waits for it except sync. */
#ifndef CT_DEVICE_H
#define CT_DEVICE_H

#include "core/device/quantized.h"
#include "core/device/factored.h"
#include "core/base/mapping.h"
#include "core/base/span.h"
#include "core/device/update.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever an entry or a struct below changes; the plugin's capsule carries it.
 */
#define CT_DEVICE_VERSION 21

/* Memory of the device that a kernel may use for partial results; grown on demand by
 * the device's own `grow`, released by `release`. Starts as {0}. */
typedef struct ct_scratch {
    void *data;
    size_t bytes;
} ct_scratch;

/* The sum of |x|^p over all elements x, p > 0, or for p = Inf the largest |x|: what the
 * p-norm is the root of (ct_norm_root). Powers are taken and added in double, in an
 * order that depends on the spans' lengths alone: neither on the number of threads nor
 * on the instruction set. Inf or NaN in any element makes it Inf or NaN. *sum is in the
 * device's memory for a GPU, in the host's for the CPU. */
typedef ct_status
ct_norm_fn(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
           size_t n_spans, double *sum, ct_error *err);

/* The same for each span by itself: sums[i] is that of spans[i], where sum would be;
 * the order depends on the spans' lengths alone. */
typedef ct_status
ct_norms_fn(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
            size_t n_spans, double *sums, ct_error *err);

/* Updates every span by one rule, each with its own constants. */
typedef ct_status ct_update_fn(void *stream, const ct_update *update, ct_error *err);

/* averages[i] = averages[i] * decay + values[i] * (1 - decay), for float dtypes; equal
 * lengths, not overlapping. Computed in fp64 where the values are F64, else in fp32. */
typedef ct_status
ct_average_fn(void *stream, const ct_span *averages, const ct_span *values,
              size_t n_spans, double decay, ct_error *err);

/* spans[i] *= factor, then no further from 0 than limit (> 0; Inf: no limit; a NaN
 * stays one), for float dtypes: what clips gradients in place. */
typedef ct_status ct_scale_fn(void *stream, double factor, double limit,
                              const ct_span *spans, size_t n_spans, ct_error *err);
/* The first part of an update by a measured rule: brings the state of every span up to
 * date and leaves the CT_MEASURES sums over spans[i], one behind the other, in the
 * device's memory. The order of the sums depends on the spans' lengths alone. */
typedef ct_status ct_measure_fn(void *stream, ct_scratch *scratch,
                                const ct_update *update, double *sums, ct_error *err);

/* The second part: from such sums, over all parts of the parameter that spans[i] is a
 * part of, the constants that the third, `update`, takes as spans[i].settled. All lie
 * in the device's memory. */
typedef ct_status
ct_settle_fn(void *stream, const ct_update *update, const double *sums,
             ct_rule_coef *settled, ct_error *err);

/* The factored second moment of Adafactor, first part: list[i].sums of what is here of
 * the gradients, in double, in an order that depends on the shapes alone. */
typedef ct_status ct_factor_sums_fn(void *stream, ct_scratch *scratch,
                                    const ct_factored *list, size_t n, ct_error *err);

/* The second part: averages and factors, from the sums over whole gradients. */
typedef ct_status
ct_factor_fn(void *stream, const ct_factored *list, size_t n, ct_error *err);

/* Every byte of every span becomes 0. */
typedef ct_status
ct_zero_fn(void *stream, const ct_span *spans, size_t n_spans, ct_error *err);

/* to[i][k] = from[i][k], rounded to nearest even between float dtypes; equal lengths,
 * not overlapping. Equal dtypes are copied byte for byte, any dtype allowed. */
typedef ct_status ct_copy_fn(void *stream, const ct_span *to, const ct_span *from,
                             size_t n_spans, ct_error *err);

/* sums[i][k] += values[i][k] * factor between float dtypes; equal lengths, not
 * overlapping. A value is rounded to the sum's dtype, so is its product, so is the sum.
 */
typedef ct_status ct_add_fn(void *stream, const ct_span *sums, const ct_span *values,
                            size_t n_spans, double factor, ct_error *err);

/* C (m x n) = alpha * op(A) (m x k) * op(B) (k x n) + beta * C, row major, all of one
 * dtype; ld* are row strides in elements. fp32 and fp64 are added in their own
 * precision, bf16 in fp32 and rounded once, to nearest even. */
typedef struct ct_gemm {
    ct_dtype dtype; /* CT_F32, CT_F64 or CT_BF16 */
    bool trans_a, trans_b;
    size_t m, n, k;
    double alpha, beta;
    const void *a, *b;
    void *c;
    size_t lda, ldb, ldc;
} ct_gemm;
typedef ct_status
ct_gemm_fn(void *stream, ct_scratch *scratch, const ct_gemm *gemm, ct_error *err);

/* Quantizes values to 8 or 4 bits, by math/quantized.h; and the sum of what
 * ranks have sent, part by part in float, back to values. A block with Inf or NaN on
 * one rank becomes NaN. */
typedef ct_status
ct_encode_fn(void *stream, const ct_encoding *encoding, ct_error *err);
typedef ct_status
ct_decode_fn(void *stream, const ct_decoding *decoding, ct_error *err);

/* Copies bytes between the host's memory and the device's, whichever has which, behind
 * what is on the stream; waits for it. */
typedef ct_status
ct_transfer_fn(void *stream, void *to, const void *from, size_t bytes, ct_error *err);

/* Brings a double from the device to the host, waiting for the stream. */
typedef ct_status
ct_read_fn(void *stream, const double *device_value, double *host, ct_error *err);

/* Makes scratch hold at least `bytes` of the device's memory. */
typedef ct_status ct_scratch_grow_fn(ct_scratch *scratch, size_t bytes, ct_error *err);
typedef void ct_scratch_release_fn(ct_scratch *scratch);

typedef struct ct_device {
    const char *name; /* "cpu", "cuda" */
    ct_norm_fn *norm;
    ct_norms_fn *norms;
    ct_update_fn *update;
    ct_average_fn *average;
    ct_measure_fn *measure;
    ct_settle_fn *settle;
    ct_factor_sums_fn *factor_sums;
    ct_factor_fn *factor;
    ct_scale_fn *scale;
    ct_zero_fn *zero;
    ct_copy_fn *copy;
    ct_add_fn *add;
    ct_gemm_fn *gemm;
    ct_encode_fn *encode;
    ct_decode_fn *decode;
    ct_transfer_fn *transfer;
    ct_read_fn *read;
    ct_scratch_grow_fn *scratch_grow;
    ct_scratch_release_fn *scratch_release;
    const ct_mapping_ops *mapping; /* of its memory; NULL: the host's */
    int dlpack; /* the kind of its memory, a DLDeviceType of DLPack */
} ct_device;

extern const ct_device ct_device_cpu;

/* The instruction set in use, "base", "v3" or "v4" (x86-64-v3 has AVX2, v4 AVX-512);
 * other processors and compilers than GCC have "base" alone. Chosen at the first call:
 * CTRAINER_ISA, else the best that the processor has. NULL when CTRAINER_ISA names one
 * that is unknown or missing here; every kernel then fails and says so. Setting NULL
 * chooses anew; CT_EINVAL when this processor lacks the one that is asked for. */
const char *ct_cpu_isa(void);
CT_NODISCARD ct_status ct_cpu_set_isa(const char *name, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
