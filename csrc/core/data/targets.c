/* The count of targets, over every label of every batch: a plain sum that vectorizes,
 * less the first label of each row if labels are shifted. */
#include "core/data/targets.h"

static size_t
count(const int64_t *labels, size_t n)
{
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        kept += labels[i] != CT_IGNORE_INDEX;
    }
    return kept;
}

size_t
ct_count_targets(const int64_t *labels, size_t n, size_t row, bool shifted)
{
    size_t kept = count(labels, n);
    for (size_t i = 0; shifted && row > 0 && i < n; i += row) {
        kept -= labels[i] != CT_IGNORE_INDEX;
    }
    return kept;
}
