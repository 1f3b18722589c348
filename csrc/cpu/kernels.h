/* What the CPU's kernels share: the instruction sets they are compiled for, the batches
 * that the pool's threads take, and their prototypes for the device's table. */
#ifndef CT_CPU_KERNELS_H
#define CT_CPU_KERNELS_H

#include "core/device/device.h"
#include "math/norm.h"

#include <stdbool.h>
#include <stddef.h>

/* ---- instruction sets ------------------------------------------------------------ */

typedef enum ct_isa {
    CT_ISA_BASE,
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CT_HAVE_X86_LEVELS 1
/* Sanitizers watch the source of bodies, which all sets have in common, and take
 * minutes to compile it. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CT_COMPILE_X86_LEVELS 1
#endif
    CT_ISA_V3,
    CT_ISA_V4,
#endif
    CT_ISA_COUNT
} ct_isa;

/* The set in use, chosen at the first call. CT_EINVAL when CTRAINER_ISA names a set
 * that is unknown or missing in this processor. */
CT_NODISCARD ct_status ct_isa_get(ct_isa *isa, ct_error *err);

/* CT_EINVAL, naming the kernel and the span, unless a dtype, or that of every span, is
 * a float. */
CT_NODISCARD ct_status ct_check_float(const char *kernel, size_t span, ct_dtype dtype,
                                      ct_error *err);
CT_NODISCARD ct_status ct_check_floats(const char *kernel, const ct_span *spans,
                                       size_t n_spans, ct_error *err);

/* The initialiser of a table [instruction set][float dtype] of a function
 * compiled by expand.h: for all dtypes, for all but float16 (CT_NO_F16), for float32
 * and float64 alone (CT_ONLY_F32_F64), or, without dtypes, for float32 (CT_ONLY_F32).
 */
#define CT_BODIES(function) CT_EACH_SET(CT_BODIES_OF, function)
#define CT_BODIES_NO_F16(function) CT_EACH_SET(CT_BODIES_NO_F16_OF, function)
#define CT_REAL_BODIES(function) CT_EACH_SET(CT_REAL_BODIES_OF, function)

#define CT_F32_BODY(function) CT_EACH_SET(CT_F32_BODY_OF, function)
#define CT_F32_BODY_OF(function, set) function##_f32_##set
#define CT_REALS_OF(function, set)                                                     \
    [CT_F32] = function##_f32_##set, [CT_F64] = function##_f64_##set
#define CT_REAL_BODIES_OF(function, set) {CT_REALS_OF(function, set)}
#define CT_BODIES_NO_F16_OF(function, set)                                             \
    {CT_REALS_OF(function, set), [CT_BF16] = function##_bf16_##set}
#define CT_BODIES_OF(function, set)                                                    \
    {CT_REALS_OF(function, set), [CT_BF16] = function##_bf16_##set,                    \
     [CT_F16] = function##_f16_##set}
#ifdef CT_COMPILE_X86_LEVELS
#define CT_EACH_SET(of, function)                                                      \
    {[CT_ISA_BASE] = of(function, base),                                               \
     [CT_ISA_V3] = of(function, v3),                                                   \
     [CT_ISA_V4] = of(function, v4)}
#elif defined(CT_HAVE_X86_LEVELS)
#define CT_EACH_SET(of, function)                                                      \
    {[CT_ISA_BASE] = of(function, base),                                               \
     [CT_ISA_V3] = of(function, base),                                                 \
     [CT_ISA_V4] = of(function, base)}
#else
#define CT_EACH_SET(of, function) {[CT_ISA_BASE] = of(function, base)}
#endif

enum {
    CT_FLOAT_DTYPES = CT_F16 + 1 /* the float dtypes come first in ct_dtype */
};

/* ---- batches --------------------------------------------------------------------- */

/* A list of spans cut into batches of about equal work for the pool.
 *
 * A batch is a run of whole spans and parts of spans, so that a thousand small tensors
 * make a few batches and a large tensor makes many. The boundaries depend on the spans'
 * lengths alone. The table has a fixed size: it lives on the stack of the
 * caller, and a kernel neither allocates nor fails. */
enum {
    CT_BATCH_ELEMS = 65536, /* of a batch, until CT_PARTITION_MAX are too few */
    CT_PARTITION_MAX = 1024,
    CT_PARTITION_ALIGN = 256 /* a span is cut at multiples of that many elements only */
};

typedef struct ct_partition_point {
    size_t span;
    size_t offset; /* elements into the span */
} ct_partition_point;

typedef struct ct_partition {
    const char *lengths; /* the n of the first span, in the caller's list */
    size_t stride;       /* bytes between the n of consecutive spans */
    size_t n_batches;
    ct_partition_point at[CT_PARTITION_MAX + 1]; /* batch b: from at[b] to at[b + 1] */
} ct_partition;

/* `lengths` points at the n of the first of n_spans spans, `stride` bytes apart. Both
 * have to stay while the partition is in use. */
void ct_partition_init(ct_partition *partition, const size_t *lengths, size_t stride,
                       size_t n_spans);

/* Elements [offset, offset + n) of a span. */
typedef struct ct_piece {
    size_t span;
    size_t offset;
    size_t n;
    size_t number; /* < n_spans + n_batches, and rising from piece to piece */
} ct_piece;

/* The pieces of a batch, in order and none empty:
 *     ct_piece piece = ct_partition_start(partition, batch);
 *     while (ct_partition_next(partition, batch, &piece)) ... */
ct_piece ct_partition_start(const ct_partition *partition, size_t batch);
bool ct_partition_next(const ct_partition *partition, size_t batch, ct_piece *piece);

/* Calls fn for every piece, on the threads of the pool. */
typedef void ct_piece_fn(const void *job, const ct_piece *piece);
void ct_partition_run(const ct_partition *partition, ct_piece_fn *fn, const void *job);

/* The same for the pieces of a list of spans. */
void
ct_for_pieces(const ct_span *spans, size_t n_spans, ct_piece_fn *fn, const void *job);

/* Merges the sums of a span's pieces in order: `width` consecutive sums for each span
 * in `sums`, and for each piece at the piece's number. */
void ct_partition_fold(const ct_partition *partition, const double *partial,
                       size_t width, size_t n_spans, ct_norm_kind kind, double *sums);

/* ---- entries of the device's table ----------------------------------------------- */

ct_norm_fn ct_cpu_norm;
ct_norms_fn ct_cpu_norms;
ct_clip_fn ct_cpu_clip;
ct_decide_fn ct_cpu_decide;
ct_update_fn ct_cpu_update;
ct_table_reserve_fn ct_cpu_table_reserve;
ct_table_release_fn ct_cpu_table_release;
ct_average_fn ct_cpu_average;
ct_measure_fn ct_cpu_measure;
ct_settle_fn ct_cpu_settle;
ct_factor_sums_fn ct_cpu_factor_sums;
ct_factor_fn ct_cpu_factor;
ct_scale_fn ct_cpu_scale;
ct_zero_fn ct_cpu_zero;
ct_copy_fn ct_cpu_copy;
ct_add_fn ct_cpu_add;
ct_gemm_fn ct_cpu_gemm;
ct_cross_entropy_fn ct_cpu_cross_entropy;
ct_encode_fn ct_cpu_encode;
ct_decode_fn ct_cpu_decode;
ct_transfer_fn ct_cpu_transfer;
ct_read_fn ct_cpu_read;
ct_read_begin_fn ct_cpu_read_begin;
ct_read_end_fn ct_cpu_read_end;
ct_read_release_fn ct_cpu_read_release;
ct_pin_fn ct_cpu_pin;
ct_unpin_fn ct_cpu_unpin;
ct_fetch_begin_fn ct_cpu_fetch_begin;
ct_fetch_end_fn ct_cpu_fetch_end;
ct_capturing_fn ct_cpu_capturing;
ct_scratch_grow_fn ct_cpu_scratch_grow;
ct_scratch_release_fn ct_cpu_scratch_release;
ct_use_fn ct_cpu_use;

/* A product by a BLAS of the process; false, and C as it was, where it has none. */
typedef bool ct_blas_fn(const ct_gemm *gemm);

/* ct_cpu_gemm asks `blas` first. */
void ct_cpu_use_blas(ct_blas_fn *blas);

#endif
