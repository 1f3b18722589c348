/* The device table: one entry per kernel, one table per kind of device.
 *
 * The .c files of csrc/cpu/ and the .cu files of the same names in cuda/ implement its
 * entries over lists of spans; the step engine sees only this table and an opaque
 * stream, so it neither includes nor links CUDA. Work is only enqueued: operands must
 * stay alive until the stream has drained; no entry but transfer, read and read_end
 * waits for the device. */
#ifndef CT_DEVICE_H
#define CT_DEVICE_H

#include "core/device/quantized.h"
#include "core/base/mapping.h"
#include "core/base/span.h"
#include "core/device/update.h"

#include <stdbool.h>
#include <stdint.h>

CT_BEGIN_DECLS

/* Raised whenever an entry or a struct below changes; the plugin's capsule carries it.
 */
#define CT_DEVICE_VERSION 32

/* Memory of the device that a kernel may use for partial results; grown on demand by
 * the device's own `grow`, released by `release`. Starts as {0}. */
typedef struct ct_scratch {
    void *data;
    size_t bytes;
} ct_scratch;

/* The sum of |x|^p over all elements x, p > 0, or for p = Inf the largest |x|;
 * ct_norm_root() makes it the p-norm. Powers are taken and added in double or as
 * ct_norm_pair, in an order that depends on the spans' lengths alone: neither on the
 * number of threads nor on the instruction set. Inf or NaN in any element makes it Inf
 * or NaN. *sum is in the device's memory for a GPU, in the host's for the CPU. */
typedef ct_status
ct_norm_fn(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
           size_t n_spans, double *sum, ct_error *err);

/* The sum of each span separately: sums[i] of spans[i], in the memory of ct_norm_fn's
 * sum; the order depends on the spans' lengths alone. */
typedef ct_status
ct_norms_fn(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
            size_t n_spans, double *sums, ct_error *err);

/* The norm of all elements and the factor that clips the elements to a norm, for a
 * later `update` on the stream. *outcome is in the memory of ct_norm_fn's sum. */
typedef ct_status ct_clip_fn(void *stream, ct_scratch *scratch,
                             const ct_clip_request *request, const ct_span *spans,
                             size_t n_spans, ct_clip_outcome *outcome, ct_error *err);

/* The same from sums that ct_norm_fn has computed and that ranks have added since: *sum
 * is the norm's, and *all is finite if the sums of all ranks are. */
typedef ct_status
ct_decide_fn(void *stream, const ct_clip_request *request, const double *sum,
             const double *all, ct_clip_outcome *outcome, ct_error *err);

/* What is the same in consecutive updates, in the memory of a GPU. Starts as {0}. */
typedef struct ct_update_table {
    ct_scratch device;
    void *host; /* holds the same */
    size_t n, capacity;
} ct_update_table;

/* Updates every span by the update's rule, with the span's constants. The table is the
 * caller's to keep for the next update on the stream; of the CPU, it stays empty and
 * may be NULL. */
typedef ct_status ct_update_fn(void *stream, ct_update_table *table,
                               const ct_update *update, ct_error *err);

/* Reserves the memory of an update of n spans. */
typedef ct_status ct_table_reserve_fn(ct_update_table *table, size_t n, ct_error *err);
typedef void ct_table_release_fn(ct_update_table *table);

/* averages[i] = averages[i] * decay + values[i] * (1 - decay), for float dtypes; equal
 * lengths, not overlapping. Computed in fp64 where the values are F64, else in fp32. */
typedef ct_status
ct_average_fn(void *stream, const ct_span *averages, const ct_span *values,
              size_t n_spans, double decay, ct_error *err);

/* Clips gradients in place: spans[i] *= factor, then limits |x| to `limit` (> 0; Inf:
 * no limit; NaN stays NaN). Float dtypes. */
typedef ct_status ct_scale_fn(void *stream, double factor, double limit,
                              const ct_span *spans, size_t n_spans, ct_error *err);

/* Step one of an update by a measured rule: updates the state of every span and writes
 * CT_MEASURES consecutive sums for each span to the device's memory. The order of
 * adding depends on the spans' lengths alone. */
typedef ct_status ct_measure_fn(void *stream, ct_scratch *scratch,
                                const ct_update *update, double *sums, ct_error *err);

/* Step two: computes settled[i], the constants of spans[i] for step three (`update`),
 * from the sums over all parts of the span's parameter, and spans[i].rms. All arrays
 * lie in the device's memory. */
typedef ct_status
ct_settle_fn(void *stream, const ct_update *update, const double *sums,
             ct_rule_coef *settled, ct_error *err);

/* Adafactor's factored second moment, step one: list[i].sums over the local part of the
 * gradients, in double, in an order that depends on the shapes alone. */
typedef ct_status ct_factor_sums_fn(void *stream, ct_scratch *scratch,
                                    const ct_factored *list, size_t n, ct_error *err);

/* Step two: averages and factors, from the sums over whole gradients. */
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

/* C (m x n) = alpha * op(A) (m x k) * op(B) (k x n) + beta * C, row major, of equal
 * dtypes; ld* are row strides in elements. fp32 and fp64 are added in the
 * same precision, bf16 in fp32 and rounded once, to nearest even. */
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

/* Rows of logits, and the class that each row is to predict. Row i begins at element
 * i * stride. On a GPU all arrays are in its memory. */
typedef struct ct_cross_entropy {
    ct_dtype dtype; /* of the logits, a float */
    size_t rows, classes, stride;
    void *logits;
    const int64_t *targets;
    double *losses;
    double smoothing; /* in [0, 1] */
    double scale;     /* of the gradient */
    bool gradient;    /* else the logits stay */
} ct_cross_entropy;

/* losses[i] = (1 - smoothing) * -log p(targets[i]) + smoothing * the mean over classes
 * of -log p, p being the softmax of row i; with `gradient`, the row becomes the loss's
 * derivative by the row's logits, times scale, in the logits' dtype. Exponentials are
 * computed in fp32, in fp64 for F64, and added in double; a probability below 2^-126 of
 * the row's largest counts as 0. A logit may be -inf; NaN makes a row and its loss NaN.
 * A target outside [0, classes) is CT_EINVAL on the CPU, with nothing changed; a GPU,
 * for which nobody waits, makes that row and its loss NaN. */
typedef ct_status
ct_cross_entropy_fn(void *stream, const ct_cross_entropy *work, ct_error *err);

/* Quantizes values to 8 or 4 bits, by math/quantized.h; and back, the sum over the
 * parts received from the ranks, in float. A block with Inf or NaN on any rank becomes
 * NaN. */
typedef ct_status
ct_encode_fn(void *stream, const ct_encoding *encoding, ct_error *err);
typedef ct_status
ct_decode_fn(void *stream, const ct_decoding *decoding, ct_error *err);

/* Copies bytes between the host's memory and the device's, in either direction, behind
 * the work on the stream; waits for the stream. */
typedef ct_status
ct_transfer_fn(void *stream, void *to, const void *from, size_t bytes, ct_error *err);

/* Brings a double from the device to the host, waiting for the stream. */
typedef ct_status
ct_read_fn(void *stream, const double *device_value, double *host, ct_error *err);

/* Bytes on their way from the device to the host. Starts as {0}. */
typedef struct ct_pending_read {
    void *host;  /* CT_PENDING_READ_MAX bytes that the device can write to */
    void *event; /* the device's, behind the copy */
    size_t bytes;
} ct_pending_read;

enum {
    CT_PENDING_READ_MAX = 64
};

/* Enqueues a copy of up to CT_PENDING_READ_MAX bytes to the host, and waits for
 * nothing; read_end waits until the copy has arrived, not for later work on the stream.
 */
typedef ct_status
ct_read_begin_fn(void *stream, ct_pending_read *read, const void *device_values,
                 size_t bytes, ct_error *err);
typedef ct_status
ct_read_end_fn(const ct_pending_read *read, void *values, ct_error *err);
typedef void ct_read_release_fn(ct_pending_read *read);

/* Copies bytes of the host to the device, for numbers: `from` is free when the call
 * returns, and nothing waits for the stream. Both are aligned to 8 bytes, and bytes is
 * a multiple of 8. */
typedef ct_status
ct_send_fn(void *stream, void *to, const void *from, size_t bytes, ct_error *err);

/* Whether work on the stream is captured into a graph and not done. */
typedef ct_status ct_capturing_fn(void *stream, bool *capturing, ct_error *err);

/* Pins memory of the host, so that the device writes there while nobody waits; and
 * makes the memory ordinary again. */
typedef ct_status ct_pin_fn(void *data, size_t bytes, ct_error *err);
typedef void ct_unpin_fn(void *data);

/* A copy between the device and pinned memory of the host, in either direction. */
typedef struct ct_host_copy {
    void *to;
    const void *from;
    size_t bytes;
} ct_host_copy;

/* Enqueues copies behind the work on the stream, and waits for nothing; later work on
 * the stream is behind the copies. *copied is NULL or of an earlier call on the stream;
 * fetch_end waits until the copies of all calls have arrived, and releases *copied. */
typedef ct_status ct_fetch_begin_fn(void *stream, const ct_host_copy *copies, size_t n,
                                    void **copied, ct_error *err);
typedef ct_status ct_fetch_end_fn(void *copied, ct_error *err);

/* Makes scratch hold at least `bytes` of the device's memory. */
typedef ct_status ct_scratch_grow_fn(ct_scratch *scratch, size_t bytes, ct_error *err);
typedef void ct_scratch_release_fn(ct_scratch *scratch);

/* Makes the GPU of that number the calling thread's; *before: the one that was. */
typedef ct_status ct_use_fn(int ordinal, int *before, ct_error *err);

typedef struct ct_device {
    const char *name; /* "cpu", "cuda" */
    ct_norm_fn *norm;
    ct_norms_fn *norms;
    ct_clip_fn *clip;
    ct_decide_fn *decide;
    ct_update_fn *update;
    ct_table_reserve_fn *table_reserve;
    ct_table_release_fn *table_release;
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
    ct_cross_entropy_fn *cross_entropy;
    ct_encode_fn *encode;
    ct_decode_fn *decode;
    ct_transfer_fn *transfer;
    ct_read_fn *read;
    ct_read_begin_fn *read_begin;
    ct_read_end_fn *read_end;
    ct_read_release_fn *read_release;
    ct_pin_fn *pin;
    ct_unpin_fn *unpin;
    ct_fetch_begin_fn *fetch_begin;
    ct_fetch_end_fn *fetch_end;
    ct_send_fn *send;
    ct_capturing_fn *capturing;
    ct_scratch_grow_fn *scratch_grow;
    ct_scratch_release_fn *scratch_release;
    ct_use_fn *use;
    const ct_mapping_ops *mapping; /* NULL: the host's */
    int dlpack;                    /* kind of the memory, a DLDeviceType of DLPack */
} ct_device;

extern const ct_device ct_device_cpu;

/* Makes the GPU of that number the thread's, and *ordinal the one that was: called
 * again, with the same variable, that is put back. Before and after the entries that
 * work on a GPU's memory. */
static inline ct_status
ct_device_switch(const ct_device *device, int *ordinal, ct_error *err)
{
    return device->use(*ordinal, ordinal, err);
}

/* Where memory is, for work behind a stream; {0}: in the host's. */
typedef struct ct_place {
    const ct_device *device;
    int ordinal;
    void *stream;
} ct_place;

/* The instruction set in use, "base", "v3" or "v4" (x86-64-v3 has AVX2, v4 AVX-512);
 * other processors and compilers than GCC have "base" alone. Chosen at the first call:
 * CTRAINER_ISA, else the best set of the processor. NULL when CTRAINER_ISA names a set
 * that is unknown or missing here; every kernel then fails and says so. Setting NULL
 * chooses anew; CT_EINVAL when the processor lacks the set. */
const char *ct_cpu_isa(void);
CT_NODISCARD ct_status ct_cpu_set_isa(const char *name, ct_error *err);

CT_END_DECLS

#endif
