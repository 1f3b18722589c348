/* Counting the targets that a batch's loss is a mean over. */
#ifndef CT_COUNT_H
#define CT_COUNT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CT_IGNORE_INDEX = -100
}; /* skipped by torch's losses */

/* How many of labels[0..n) are not CT_IGNORE_INDEX. shifted: each row of `row` labels
 * predicts its successor, so the first of a row is no target; row is 0 or divides n. */
size_t ct_count_targets(const int64_t *labels, size_t n, size_t row, bool shifted);

#endif
