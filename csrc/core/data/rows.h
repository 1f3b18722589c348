/* Rows of an array with a second dimension that may differ from batch to batch.
 *
 * Batches lie packed one behind the other, each in its own width; the gaps are made
 * once, in place, at the end. So nothing is moved while rows arrive, whatever the order
 * of widths, and the peak is the final array. */
#ifndef CORE_DATA_ROWS_H
#define CORE_DATA_ROWS_H

#include "core/base/region.h"
#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>

CT_BEGIN_DECLS

/* Neighbouring rows of equal width. */
typedef struct ct_run {
    size_t n_rows;
    size_t width; /* positions in a row: the second dimension, 1 if there is none */
} ct_run;

typedef struct ct_rows {
    ct_region region;
    ct_run *runs;
    size_t n_runs;
    size_t runs_capacity;
    size_t position_bytes; /* of an element times the dimensions beyond the second */
    size_t n_rows;
    size_t width; /* of the widest row */
    size_t used_bytes;
    size_t expected_rows;     /* to reserve at the first batch; 0 if not known */
    size_t spill_bytes;       /* beyond this the rows move to a file; 0: never */
    const char *spill_folder; /* kept alive by the owner of the rows */
} ct_rows;

/* Makes room for n more rows of `width` positions, so that their append cannot fail: a
 * caller with several arrays reserves in all before it appends to the first. */
CT_NODISCARD ct_status ct_rows_reserve(ct_rows *rows, size_t n, size_t width,
                                       ct_error *err);

/* Copies n rows of `width` positions from `data`, contiguous. CT_ENOMEM and CT_EIO
 * leave the rows unchanged. */
CT_NODISCARD ct_status ct_rows_append(ct_rows *rows, const void *data, size_t n,
                                      size_t width, ct_error *err);

/* Spreads the rows to the widest one's width, filling the gaps on the right with the
 * element at fill_item, and trims the region to n_rows * width * position_bytes. On
 * failure, CT_ENOMEM or CT_EIO, the rows stay packed. Rows may be appended afterwards.
 */
CT_NODISCARD ct_status ct_rows_spread(ct_rows *rows, const void *fill_item,
                                      size_t item_bytes, ct_error *err);

void ct_rows_fini(ct_rows *rows); /* releases everything */

/* Putting sequences into the rows of a padded batch. */

typedef struct ct_pad_rule {
    size_t width;      /* items of a row */
    size_t item_bytes; /* > 0 */
    bool left;         /* the padding comes first */
    bool rotate;       /* a sequence's last item is left out, and `first` put before */
    const void *first; /* an item, or NULL: the item that is left out */
} ct_pad_rule;

/* Copies values[0..n), n <= width, into `row`, which is padding already. `row` and
 * `values` do not overlap. */
void ct_pad_row(const ct_pad_rule *rule, void *row, const void *values, size_t n);

CT_END_DECLS

#endif
