/* Putting sequences into the rows of a padded batch. */
#ifndef CT_PAD_H
#define CT_PAD_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_pad_rule {
    size_t width;      /* items of a row */
    size_t item_bytes; /* > 0 */
    bool left;         /* the padding comes first */
    bool rotate;       /* a sequence's last item is left out, and `first` put before */
    const void *first; /* one item, or NULL: the item that is left out */
} ct_pad_rule;

/* Copies values[0..n), n <= width, into `row`, which is padding already. The two do not
 * overlap. */
void ct_pad_row(const ct_pad_rule *rule, void *row, const void *values, size_t n);

#ifdef __cplusplus
}
#endif

#endif
