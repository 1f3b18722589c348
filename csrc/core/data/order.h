/* The order of samples by their length, and rows put back into the order of the data.
 *
 * Batches of samples of like length need little padding. Source of the grouping, to the
 * same order: transformers 5.17, get_length_grouped_indices. */
#ifndef CT_ORDER_H
#define CT_ORDER_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

/* Sorts each chunk of `chunk` indices in order[0..n), the last chunk perhaps shorter,
 * by descending length; the order of samples of equal length stays.
 * lengths[0..n_lengths) are by index. CT_EINVAL, with the order untouched, for an index
 * that is not in [0, n_lengths) and a chunk of 0; CT_ENOMEM. */
CT_NODISCARD ct_status ct_order_by_length(int64_t *order, size_t n,
                                          const int32_t *lengths, size_t n_lengths,
                                          size_t chunk, ct_error *err);

/* Exchanges order[0] with the longest sample among the first ones of all chunks, so
 * that too large a batch fails at once. The order is checked. */
void
ct_order_longest_first(int64_t *order, size_t n, const int32_t *lengths, size_t chunk);

/* Moves row i of n rows to place to[i], for all rows, in place. CT_EINVAL, with the
 * rows untouched, if `to` is no permutation of 0 .. n - 1; CT_ENOMEM. */
CT_NODISCARD ct_status ct_rows_move(void *rows, size_t n, size_t row_bytes,
                                    const int64_t *to, ct_error *err);

CT_END_DECLS

#endif
