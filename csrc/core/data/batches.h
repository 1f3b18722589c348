/* Cutting an ordered list of samples into batches by size.
 *
 * A batch is padded to its longest sample and so costs (samples) x (tokens of the
 * longest). Samples are taken in order for as long as the batch stays within the rule;
 * a batch of more than `multiple` samples is then cut back to a multiple.
 * Source, to the same batches: fairseq, data/data_utils_fast.pyx. */
#ifndef CORE_DATA_BATCHES_H
#define CORE_DATA_BATCHES_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

typedef struct ct_batch_rule {
    int64_t max_tokens;    /* of a padded batch; <= 0: no limit */
    int64_t max_sentences; /* in a batch; <= 0: no limit */
    int64_t multiple;      /* >= 1 */
} ct_batch_rule;

/* CT_EINVAL for a multiple below 1. */
CT_NODISCARD ct_status ct_batch_rule_check(const ct_batch_rule *rule, ct_error *err);

/* Finds the end of the batch that begins with sample `start` < n; tokens[0..n) are the
 * samples' lengths, of which negative ones count as 0. CT_EINVAL, *end untouched, for a
 * first sample that is too long for a batch of its own. No product is formed, so that
 * no lengths or limits overflow. */
CT_NODISCARD ct_status ct_batch_next(const ct_batch_rule *rule, const int64_t *tokens,
                                     size_t n, size_t start, size_t *end,
                                     ct_error *err);

/* Cutting a stream of tokens, many items one after another, into blocks.
 *
 * Source, to the same blocks: fairseq, data/token_block_utils_fast.pyx. */

typedef enum ct_break_mode {
    CT_BREAK_NONE,         /* full blocks, wherever items end */
    CT_BREAK_COMPLETE,     /* whole items, as many as a block takes */
    CT_BREAK_COMPLETE_DOC, /* the same within documents; separators are left out */
    CT_BREAK_EOS           /* an item a block */
} ct_break_mode;

typedef struct ct_block_rule {
    ct_break_mode mode;
    int64_t block_tokens;     /* >= 1; not read by CT_BREAK_EOS */
    int64_t separator_tokens; /* an item of that size ends a document */
} ct_block_rule;

/* Tokens [start, end) of the stream, from `offset` in item `first` to item `last`. */
typedef struct ct_block {
    int64_t start, end, first, offset, last;
} ct_block;

/* CT_EINVAL for an impossible size of an item or a block, or a sum of sizes of more
 * than 63 bits. */
CT_NODISCARD ct_status ct_blocks_check(const ct_block_rule *rule, const int64_t *sizes,
                                       size_t n, ct_error *err);

/* The number of blocks of n checked items; the first `room` blocks are written to
 * `blocks`. An item of more than block_tokens is a block of its own if items stay
 * whole; documents of a single token and, but for CT_BREAK_EOS, empty blocks are left
 * out. */
size_t ct_blocks_cut(const ct_block_rule *rule, const int64_t *sizes, size_t n,
                     ct_block *blocks, size_t room);

/* The table of a memory-mapped data set: the place of each item in the data file.
 *
 * n sizes, int32, in elements, and n offsets, int64, in bytes, both little-endian and
 * at any alignment, as in fairseq's files. CT_EINVAL, naming the first such item, if a
 * size or an offset is negative, an offset no multiple of an element's bytes, or an
 * item not wholly within data_bytes. After CT_OK every item can be read without a
 * further check. */
CT_NODISCARD ct_status ct_index_check(const void *sizes, const void *offsets, size_t n,
                                      size_t element_bytes, size_t data_bytes,
                                      ct_error *err);

CT_END_DECLS

#endif
