/* Cutting a stream of tokens, which is many items one after another, into blocks.
 *
 * Source of the rules: fairseq, data/token_block_utils_fast.pyx, whose blocks these
 * are. */
#ifndef CT_BLOCKS_H
#define CT_BLOCKS_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ct_break_mode {
    CT_BREAK_NONE,         /* full blocks, wherever items end */
    CT_BREAK_COMPLETE,     /* whole items, as many as a block takes */
    CT_BREAK_COMPLETE_DOC, /* the same within documents; separators are left out */
    CT_BREAK_EOS           /* an item a block */
} ct_break_mode;

typedef struct ct_block_rule {
    ct_break_mode mode;
    int64_t block_tokens;     /* >= 1; CT_BREAK_EOS does not look at it */
    int64_t separator_tokens; /* an item of that size ends a document */
} ct_block_rule;

/* Tokens [start, end) of the stream: they begin at `offset` in item `first` and end in
 * item `last`. */
typedef struct ct_block {
    int64_t start, end, first, offset, last;
} ct_block;

/* CT_EINVAL for an item or a block of a size that cannot be, or sizes whose sum has
 * more than 63 bits. */
CT_NODISCARD ct_status ct_blocks_check(const ct_block_rule *rule, const int64_t *sizes,
                                       size_t n, ct_error *err);

/* The number of blocks of n items that have been checked, the first `room` of them
 * written to `blocks`. An item of more than block_tokens is a block of its own where
 * items stay whole; documents of one token and blocks of none, but for CT_BREAK_EOS,
 * are left out. */
size_t ct_blocks_cut(const ct_block_rule *rule, const int64_t *sizes, size_t n,
                     ct_block *blocks, size_t room);

#ifdef __cplusplus
}
#endif

#endif
