/* A batch ends at a whole span, or inside a span at a multiple of CT_PARTITION_ALIGN
 * elements, so no block of quantized state is in two batches. */
#include "cpu/partition.h"

#include "core/base/pool.h"

#include <string.h>

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
    return (ct_piece){partition->at[batch].span, partition->at[batch].offset, 0};
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
    *piece = (ct_piece){span, offset, stop - offset};
    return stop != offset;
}

void
ct_partition_fold(const ct_partition *partition, const double *partial, size_t width,
                  size_t n_spans, double *sums)
{
    for (size_t i = 0; i < n_spans * width; i++) {
        sums[i] = 0.0;
    }
    for (size_t b = 0; b < partition->n_batches; b++) {
        ct_piece piece = ct_partition_start(partition, b);
        while (ct_partition_next(partition, b, &piece)) {
            const double *from = partial + ct_partition_number(b, &piece) * width;
            for (size_t k = 0; k < width; k++) {
                sums[piece.span * width + k] += from[k];
            }
        }
    }
}

typedef struct pieces_job {
    ct_partition partition;
    ct_piece_fn *fn;
    const void *job;
} pieces_job;

static void
run_batch(void *arg, size_t batch)
{
    const pieces_job *pieces = arg;
    ct_piece piece = ct_partition_start(&pieces->partition, batch);
    while (ct_partition_next(&pieces->partition, batch, &piece)) {
        pieces->fn(pieces->job, &piece);
    }
}

void
ct_for_pieces(const size_t *lengths, size_t stride, size_t n_spans, ct_piece_fn *fn,
              const void *job)
{
    pieces_job pieces = {.fn = fn, .job = job};
    ct_partition_init(&pieces.partition, lengths, stride, n_spans);
    ct_pool_run(run_batch, &pieces, pieces.partition.n_batches);
}
