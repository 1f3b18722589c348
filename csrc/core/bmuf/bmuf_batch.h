/* Lists of tensors, cut into batches of a size. */
#ifndef CT_BMUF_BATCH_H
#define CT_BMUF_BATCH_H

#include "core/bmuf/bmuf.h"

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
    size_t start;          /* of the batch, in flat buffers */
    void *shares;          /* of the batch: what is reduced; the caller's */
    size_t tensor, offset; /* of the next piece */
    size_t at;             /* of the next piece, in flat buffers */
} ct_bmuf_batch;

/* Batches of at most so many bytes, 0: all in one; empty until it is moved on. */
ct_bmuf_batch
ct_bmuf_first_batch(const ct_bmuf_list *list, ct_dtype dtype, size_t bytes);

/* Takes the next pieces, at most list->n; false when there are none. */
bool ct_bmuf_next_batch(ct_bmuf_batch *batch, ct_bmuf_piece *pieces);

/* core/bmuf/bmuf.c: elements of each dtype, CT_EINVAL for an integer; and whether they are as
 * many as when the block began. */
CT_NODISCARD ct_status ct_bmuf_count(const ct_bmuf_list *list, size_t *n,
                                     ct_error *err);
CT_NODISCARD ct_status ct_bmuf_check_unchanged(const ct_bmuf *bmuf,
                                               const ct_bmuf_list *list, ct_error *err);

/* Room for a batch of so many tensors, which has at most one piece of each. */
CT_NODISCARD ct_status ct_bmuf_reserve_operands(ct_bmuf *bmuf, size_t n, ct_error *err);

/* core/bmuf/bmuf_join.c: CT_EINVAL on all ranks where their global models are not the same;
 * their sums are compared. */
CT_NODISCARD ct_status ct_bmuf_check_alike(ct_bmuf *bmuf, ct_comm *comm, ct_error *err);

static inline ct_dtype
ct_bmuf_flat_dtype(const ct_bmuf_flat *flat, ct_dtype dtype)
{
    return flat->is_single ? CT_F32 : dtype;
}

static inline void *
ct_bmuf_flat_at(const ct_bmuf_flat *flat, ct_dtype dtype, size_t at)
{
    return (char *)flat->memory[dtype].data +
           at * ct_dtype_size(ct_bmuf_flat_dtype(flat, dtype));
}

#endif
