/* Lists of tensors, cut into batches of a size. */
#ifndef CT_BMUF_BATCH_H
#define CT_BMUF_BATCH_H

#include "core/ct_bmuf.h"

/* A part of a tensor, and where it is in the flat buffers of its dtype. */
typedef struct ct_bmuf_piece {
    ct_span span, copy;
    size_t at;
} ct_bmuf_piece;

/* Pieces that are computed in one dtype, one behind the other, and where the next batch
 * starts. */
typedef struct ct_bmuf_batch {
    const ct_bmuf_list *list;
    ct_dtype dtype;
    size_t most; /* elements in a batch */
    size_t n_pieces, n;
    size_t tensor, offset; /* of the next piece */
    size_t at;             /* of the next piece, in flat buffers */
} ct_bmuf_batch;

/* Batches of at most so many bytes, 0: all in one; empty until it is moved on. */
ct_bmuf_batch
ct_bmuf_first_batch(const ct_bmuf_list *list, ct_dtype dtype, size_t bytes);

/* Takes the next pieces, at most list->n; false when there are none. */
bool ct_bmuf_next_batch(ct_bmuf_batch *batch, ct_bmuf_piece *pieces);

#endif
