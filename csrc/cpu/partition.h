/* A list of spans cut into batches of about equal work for the pool.
 *
 * A batch is a run of whole spans and parts of spans, so that a thousand small tensors
 * make a few batches and a large tensor makes many. The boundaries depend on the spans'
 * lengths alone. The table has a fixed size: it lives on the stack of the
 * caller, and a kernel neither allocates nor fails. */
#ifndef CT_CPU_PARTITION_H
#define CT_CPU_PARTITION_H

#include <stdbool.h>
#include <stddef.h>

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
} ct_piece;

/* The pieces of a batch, in order and none empty:
 *     ct_piece piece = ct_partition_start(partition, batch);
 *     while (ct_partition_next(partition, batch, &piece)) ... */
ct_piece ct_partition_start(const ct_partition *partition, size_t batch);
bool ct_partition_next(const ct_partition *partition, size_t batch, ct_piece *piece);

/* The piece's number, below n_spans + n_batches and rising from piece to piece, as the
 * span or the batch changes with every piece. */
static inline size_t
ct_partition_number(size_t batch, const ct_piece *piece)
{
    return piece->span + batch;
}

/* Calls fn for every piece of a list of spans, on the threads of the pool. */
typedef void ct_piece_fn(const void *job, const ct_piece *piece);
void ct_for_pieces(const size_t *lengths, size_t stride, size_t n_spans,
                   ct_piece_fn *fn, const void *job);

/* Adds the sums of a span's pieces in order: `width` consecutive sums for each span in
 * `sums`, and for each piece at the piece's number. */
void ct_partition_fold(const ct_partition *partition, const double *partial,
                       size_t width, size_t n_spans, double *sums);

#endif
