/* Which part of a stream of batches is one rank's.
 *
 * Batches are dealt out in rounds, so that all ranks get equally many. Apart: a round
 * is world_size batches, one for each rank in order. Split: it is one batch, of which
 * every rank gets an equal part. The last round may be short: fewer batches, or a last
 * one with fewer items. `even` then fills it up with items from the beginning of the
 * stream, again and again if there are too few; else it is dealt out as it is, or not
 * at all with drop_last. Source of the rules: accelerate 1.x, data_loader.py,
 * BatchSamplerShard, whose parts these are. */
#ifndef CT_SHARD_H
#define CT_SHARD_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

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
