/* What the CPU's kernels share: the choice of an instruction set, the cutting of work
 * into batches, and memory. Apart from the table of all kernels in device.c, so that no
 * kernel depends on the others. */
#include "cpu/kernels.h"

#include "core/base/alloc.h"
#include "core/base/arena.h"
#include "core/base/pool.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* ---- the instruction set: CTRAINER_ISA, or the processor's best ------------------ */

enum {
    UNSET = -1
};

static atomic_int chosen = UNSET;

static const char *const names[CT_ISA_COUNT] = {
    [CT_ISA_BASE] = "base",
#ifdef CT_HAVE_X86_LEVELS
    [CT_ISA_V3] = "v3",
    [CT_ISA_V4] = "v4",
#endif
};

/* The compiler's levels, not single features: a body is compiled for all of a level. */
static bool
supported(ct_isa isa)
{
#ifdef CT_HAVE_X86_LEVELS
    __builtin_cpu_init();
    if (isa == CT_ISA_V3) {
        return __builtin_cpu_supports("x86-64-v3");
    }
    if (isa == CT_ISA_V4) {
        return __builtin_cpu_supports("x86-64-v4");
    }
#endif
    return isa == CT_ISA_BASE;
}

static ct_isa
best(void)
{
    int isa = CT_ISA_COUNT - 1;
    while (!supported((ct_isa)isa)) {
        isa--;
    }
    return (ct_isa)isa;
}

static ct_status
find(const char *name, ct_isa *isa, ct_error *err)
{
    for (int i = 0; i < CT_ISA_COUNT; i++) {
        if (strcmp(name, names[i]) == 0) {
            *isa = (ct_isa)i;
            return supported(*isa) ? CT_OK
                                   : ct_fail(err, CT_EINVAL,
                                             "this processor lacks the instruction set "
                                             "'%s'; the best it has is '%s'",
                                             name, names[best()]);
        }
    }
    return ct_fail(err, CT_EINVAL,
                   "the instruction set (CTRAINER_ISA) must be 'base', 'v3' or 'v4', "
                   "got '%s'",
                   name);
}

/* Threads may choose at once: all choose alike, so a relaxed store is enough. An error
 * is not stored, and every kernel reports a wrong CTRAINER_ISA anew. */
ct_status
ct_isa_get(ct_isa *isa, ct_error *err)
{
    const int known = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (known != UNSET) {
        *isa = (ct_isa)known;
        return CT_OK;
    }
    const char *wish = getenv("CTRAINER_ISA");
    *isa = best();
    if (wish != NULL && *wish != '\0') {
        ct_status status = find(wish, isa, err);
        if (status != CT_OK) {
            return status;
        }
    }
    atomic_store_explicit(&chosen, (int)*isa, memory_order_relaxed);
    return CT_OK;
}

const char *
ct_cpu_isa(void)
{
    ct_isa isa;
    return ct_isa_get(&isa, NULL) == CT_OK ? names[isa] : NULL;
}

ct_status
ct_cpu_set_isa(const char *name, ct_error *err)
{
    if (name == NULL) {
        atomic_store_explicit(&chosen, UNSET, memory_order_relaxed);
        ct_isa ignored;
        return ct_isa_get(&ignored, err);
    }
    ct_isa isa;
    ct_status status = find(name, &isa, err);
    if (status == CT_OK) {
        atomic_store_explicit(&chosen, (int)isa, memory_order_relaxed);
    }
    return status;
}

ct_status
ct_check_float(const char *kernel, size_t span, ct_dtype dtype, ct_error *err)
{
    return ct_dtype_is_float(dtype)
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "%s: span %zu is %s, and only float dtypes work", kernel, span,
                         ct_dtype_name(dtype));
}

ct_status
ct_check_floats(const char *kernel, const ct_span *spans, size_t n_spans, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < n_spans; i++) {
        status = ct_check_float(kernel, i, spans[i].dtype, err);
    }
    return status;
}

/* ---- batches --------------------------------------------------------------------- */

/* A batch ends at a whole span, or inside a span at a multiple of CT_PARTITION_ALIGN
 * elements, so no block of quantized state is in two batches. */
static size_t
length(const ct_partition *partition, size_t span)
{
    size_t n;
    memcpy(&n, partition->lengths + span * partition->stride, sizeof n);
    return n;
}

static size_t
batch_elems(const ct_partition *partition, size_t n_spans)
{
    size_t total = 0;
    for (size_t i = 0; i < n_spans; i++) {
        total += length(partition, i);
    }
    /* With so many elements to a batch, all batches and a last, shorter one fit the
     * table. */
    const size_t share = total / (CT_PARTITION_MAX - 1) + CT_PARTITION_ALIGN;
    return share > CT_BATCH_ELEMS ? share : CT_BATCH_ELEMS;
}

/* A full batch ends behind the current span, or inside the span when more than
 * CT_PARTITION_ALIGN elements are left over. */
void
ct_partition_init(ct_partition *partition, const size_t *lengths, size_t stride,
                  size_t n_spans)
{
    partition->lengths = (const char *)lengths;
    partition->stride = stride;
    partition->n_batches = 0;
    partition->at[0] = (ct_partition_point){0, 0};

    const size_t full = batch_elems(partition, n_spans);
    size_t held = 0; /* elements in the open batch */
    for (size_t i = 0; i < n_spans; i++) {
        const size_t n = length(partition, i);
        size_t done = 0;
        while (held + (n - done) >= full + CT_PARTITION_ALIGN) {
            done += full - held + (CT_PARTITION_ALIGN - 1);
            done -= done % CT_PARTITION_ALIGN;
            partition->at[++partition->n_batches] = (ct_partition_point){i, done};
            held = 0;
        }
        held += n - done;
    }
    if (held != 0) {
        partition->at[++partition->n_batches] = (ct_partition_point){n_spans, 0};
    }
}

ct_piece
ct_partition_start(const ct_partition *partition, size_t batch)
{
    return (ct_piece){partition->at[batch].span, partition->at[batch].offset, 0, 0};
}

bool
ct_partition_next(const ct_partition *partition, size_t batch, ct_piece *piece)
{
    const ct_partition_point end = partition->at[batch + 1];
    size_t span = piece->span;
    size_t offset = piece->offset + piece->n;
    while (span < end.span && offset == length(partition, span)) {
        span++;
        offset = 0;
    }
    const size_t stop = span == end.span ? end.offset : length(partition, span);
    /* The span or the batch changes with every piece, and so does their sum. */
    *piece = (ct_piece){span, offset, stop - offset, span + batch};
    return stop != offset;
}

/* In the order of the pieces, so that sums do not depend on the threads. */
void
ct_partition_fold(const ct_partition *partition, const double *partial, size_t width,
                  size_t n_spans, ct_norm_kind kind, double *sums)
{
    for (size_t i = 0; i < n_spans * width; i++) {
        sums[i] = 0.0;
    }
    for (size_t b = 0; b < partition->n_batches; b++) {
        ct_piece piece = ct_partition_start(partition, b);
        while (ct_partition_next(partition, b, &piece)) {
            const double *from = partial + piece.number * width;
            for (size_t k = 0; k < width; k++) {
                double *sum = &sums[piece.span * width + k];
                *sum = ct_norm_merge(kind, *sum, from[k]);
            }
        }
    }
}

typedef struct pieces_job {
    const ct_partition *partition;
    ct_piece_fn *fn;
    const void *job;
} pieces_job;

static void
run_batch(void *arg, size_t batch)
{
    const pieces_job *pieces = arg;
    ct_piece piece = ct_partition_start(pieces->partition, batch);
    while (ct_partition_next(pieces->partition, batch, &piece)) {
        pieces->fn(pieces->job, &piece);
    }
}

void
ct_partition_run(const ct_partition *partition, ct_piece_fn *fn, const void *job)
{
    pieces_job pieces = {partition, fn, job};
    ct_pool_run(run_batch, &pieces, partition->n_batches);
}

void
ct_for_pieces(const ct_span *spans, size_t n_spans, ct_piece_fn *fn, const void *job)
{
    ct_partition partition;
    if (n_spans != 0) {
        ct_partition_init(&partition, &spans[0].n, sizeof *spans, n_spans);
        ct_partition_run(&partition, fn, job);
    }
}

/* ---- memory: ordinary, with nothing to wait for -----------------------------------
 */

/* No stream: the CPU's kernels have ended on return. */
ct_status
ct_cpu_read(void *stream, const double *device_value, double *host, ct_error *err)
{
    (void)stream;
    (void)err;
    *host = *device_value;
    return CT_OK;
}

ct_status
ct_cpu_transfer(void *stream, void *to, const void *from, size_t bytes, ct_error *err)
{
    (void)stream;
    (void)err;
    if (bytes != 0) {
        memcpy(to, from, bytes);
    }
    return CT_OK;
}

ct_status
ct_cpu_read_begin(void *stream, ct_pending_read *read, const void *device_values,
                  size_t bytes, ct_error *err)
{
    (void)stream;
    if (read->host == NULL) {
        read->host = ct_calloc(1, CT_PENDING_READ_MAX);
    }
    if (read->host == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read values into");
    }
    memcpy(read->host, device_values, bytes);
    read->bytes = bytes;
    return CT_OK;
}

ct_status
ct_cpu_read_end(const ct_pending_read *read, void *values, ct_error *err)
{
    (void)err;
    memcpy(values, read->host, read->bytes);
    return CT_OK;
}

void
ct_cpu_read_release(ct_pending_read *read)
{
    ct_free(read->host);
    *read = (ct_pending_read){0};
}

ct_status
ct_cpu_pin(void *data, size_t bytes, ct_error *err)
{
    (void)data;
    (void)bytes;
    (void)err;
    return CT_OK;
}

void
ct_cpu_unpin(void *data)
{
    (void)data;
}

ct_status
ct_cpu_fetch_begin(void *stream, const ct_host_copy *copies, size_t n, void **copied,
                   ct_error *err)
{
    *copied = NULL;
    for (size_t i = 0; i < n; i++) {
        (void)ct_cpu_transfer(stream, copies[i].to, copies[i].from, copies[i].bytes,
                              err);
    }
    return CT_OK;
}

ct_status
ct_cpu_fetch_end(void *copied, ct_error *err)
{
    (void)copied;
    (void)err;
    return CT_OK;
}

ct_status
ct_cpu_capturing(void *stream, bool *capturing, ct_error *err)
{
    (void)stream;
    (void)err;
    *capturing = false;
    return CT_OK;
}

enum {
    LONG = 128 << 10 /* bytes of a block that shares the pages of units */
};

/* Between other blocks of the heap a block that comes and goes leaves gaps that are too
 * short for the next one. */
ct_status
ct_cpu_scratch_grow(ct_scratch *scratch, size_t bytes, ct_error *err)
{
    if (bytes <= scratch->bytes) {
        return CT_OK;
    }
    void *block = bytes < LONG ? NULL : ct_arena_alloc(bytes);
    if (block == NULL) {
        block = ct_alloc(bytes);
    }
    if (block == NULL) {
        return ct_fail(err, CT_ENOMEM, "out of memory: %zu bytes of scratch", bytes);
    }
    ct_cpu_scratch_release(scratch);
    *scratch = (ct_scratch){block, bytes};
    return CT_OK;
}

void
ct_cpu_scratch_release(ct_scratch *scratch)
{
    if (!ct_arena_free(scratch->data)) {
        ct_free(scratch->data);
    }
    *scratch = (ct_scratch){0};
}

/* The host is one device. */
ct_status
ct_cpu_use(int ordinal, int *before, ct_error *err)
{
    (void)err;
    *before = ordinal;
    return CT_OK;
}
