/* Cutting an ordered list of samples into batches by size.
 *
 * A batch is padded to its longest sample, so it costs (samples in it) x (tokens of the
 * longest). Samples are taken in order for as long as the batch stays within the rule;
 * where that leaves more than `multiple` of them, the batch is cut back to a multiple.
 * Source of the rule: fairseq, data/data_utils_fast.pyx, whose batches these are. */
#ifndef CORE_DATA_BATCHES_H
#define CORE_DATA_BATCHES_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A batch that a model is compiled for: that many samples of up to that many tokens. */
typedef struct ct_batch_shape {
    int64_t sentences, tokens;
} ct_batch_shape;

typedef struct ct_batch_rule {
    int64_t max_tokens;    /* of a padded batch; <= 0: no limit */
    int64_t max_sentences; /* in a batch; <= 0: no limit */
    int64_t multiple;      /* >= 1 */
    /* With n_shapes > 0 a batch has to fit one of these, in any order, and the limits
     * above do not count. Kept alive by the owner of the rule. */
    const ct_batch_shape *shapes;
    size_t n_shapes;
} ct_batch_rule;

/* CT_EINVAL for a multiple below 1. */
CT_NODISCARD ct_status ct_batch_rule_check(const ct_batch_rule *rule, ct_error *err);

/* Finds where the batch ends that begins with sample `start` < n; tokens[0..n) are the
 * samples' lengths, those below 0 counting as 0. CT_EINVAL, *end untouched, where that
 * sample is too long for a batch of its own. No product is formed, so that no lengths
 * or limits overflow. */
CT_NODISCARD ct_status ct_batch_next(const ct_batch_rule *rule, const int64_t *tokens,
                                     size_t n, size_t start, size_t *end,
                                     ct_error *err);

/* Cutting a stream of tokens, which is many items one after another, into blocks.
 *
 * Source of the rules: fairseq, data/token_block_utils_fast.pyx, whose blocks these
 * are. */

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

/* Which part of a stream of batches is one rank's.
 *
 * Batches are dealt out in rounds, so that all ranks get equally many. Apart: a round
 * is world_size batches, one for each rank in order. Split: it is one batch, of which
 * every rank gets an equal part. The last round may be short: fewer batches, or a last
 * one with fewer items. `even` then fills it up with items from the beginning of the
 * stream, again and again if there are too few; else it is dealt out as it is, or not
 * at all with drop_last. Source of the rules: accelerate 1.x, data_loader.py,
 * BatchSamplerShard, whose parts these are. */

typedef struct ct_shard {
    int rank, world_size;
    size_t batch_size; /* items of a whole batch; 0: batches have any length, and a
                        * short round is filled up with whole batches */
    bool split, even, drop_last;
} ct_shard;

/* What a rank gets of a round: items [from, to) of its batch number `batch`, and then
 * `fill` items from number `fill_from` on of the stream's beginning, which is repeated
 * without end. With a batch_size of 0 the filling is batch number fill_from of it. */
typedef struct ct_shard_part {
    size_t batch, from, to;
    size_t fill_from, fill;
    bool whole; /* the batch as it is: from and to do not count */
    bool none;  /* nothing */
} ct_shard_part;

/* CT_EINVAL for a rank out of range, and for batches that cannot be split. */
CT_NODISCARD ct_status ct_shard_check(const ct_shard *shard, ct_error *err);

/* Batches in a round. */
size_t ct_shard_round(const ct_shard *shard);

/* How many batches of the stream's beginning filling up may need. */
size_t ct_shard_beginning(const ct_shard *shard);

/* Are there n batches of which the last has last_length items a whole round? Then it
 * does not matter whether more follow. */
bool ct_shard_is_whole(const ct_shard *shard, size_t n, size_t last_length);

/* The rank's part of a round of n batches (> 0), of which the last has last_length
 * items. is_last: no batch follows. */
ct_shard_part
ct_shard_take(const ct_shard *shard, size_t n, size_t last_length, bool is_last);

/* How many batches the rank gets of a stream of n; of batches that are whole but for
 * the last. */
size_t ct_shard_count(const ct_shard *shard, size_t n);

#ifdef __cplusplus
}
#endif

#endif
