#include "core/data/shard.h"

ct_status
ct_shard_check(const ct_shard *shard, ct_error *err)
{
    if (shard->world_size < 1 || shard->rank < 0 || shard->rank >= shard->world_size) {
        return ct_fail(err, CT_EINVAL, "rank is %d; expected one in [0, %d)",
                       shard->rank, shard->world_size);
    }
    if (!shard->split) {
        return CT_OK;
    }
    if (shard->batch_size == 0 || shard->batch_size % (size_t)shard->world_size != 0) {
        return ct_fail(err, CT_EINVAL,
                       "split_batches deals every batch out to %d ranks, and a "
                       "batch has %zu items; make that a multiple of the ranks",
                       shard->world_size, shard->batch_size);
    }
    return CT_OK;
}

size_t
ct_shard_round(const ct_shard *shard)
{
    return shard->split ? 1 : (size_t)shard->world_size;
}

size_t
ct_shard_beginning(const ct_shard *shard)
{
    return shard->even && !shard->drop_last ? ct_shard_round(shard) : 0;
}

bool
ct_shard_is_whole(const ct_shard *shard, size_t n, size_t last_length)
{
    return n == ct_shard_round(shard) && last_length >= shard->batch_size;
}

static ct_shard_part
take_split(const ct_shard *shard, size_t length, bool is_short)
{
    const size_t part = shard->batch_size / (size_t)shard->world_size;
    const size_t from = part * (size_t)shard->rank, to = from + part;
    if (!is_short) {
        return (ct_shard_part){.from = from, .to = to};
    }
    const size_t begin = from < length ? from : length;
    const size_t end = to < length ? to : length;
    if (!shard->even) {
        return (ct_shard_part){.from = begin, .to = end, .none = begin == end};
    }
    return (ct_shard_part){.from = begin,
                           .to = end,
                           .fill_from = from > length ? from - length : 0,
                           .fill = part - (end - begin)};
}

/* The short last round of batches of one length. */
static ct_shard_part
fill_apart(const ct_shard *shard, size_t n, size_t last_length)
{
    const size_t rank = (size_t)shard->rank;
    const size_t missing = /* of the last batch */
        last_length < shard->batch_size ? shard->batch_size - last_length : 0;
    if (rank + 1 < n) {
        return (ct_shard_part){.batch = rank, .whole = true};
    }
    if (rank + 1 == n) {
        return (ct_shard_part){.batch = rank, .to = last_length, .fill = missing};
    }
    return (ct_shard_part){.fill_from = missing + (rank - n) * shard->batch_size,
                           .fill = shard->batch_size};
}

ct_shard_part
ct_shard_take(const ct_shard *shard, size_t n, size_t last_length, bool is_last)
{
    const size_t rank = (size_t)shard->rank;
    const bool any_length = shard->batch_size == 0;
    const bool is_short = !ct_shard_is_whole(shard, n, last_length);
    if (is_short && is_last && shard->drop_last) {
        return (ct_shard_part){.none = true};
    }
    if (shard->split) {
        return take_split(shard, last_length, is_short);
    }
    if (!is_short || !is_last || !shard->even || (any_length && rank < n)) {
        return (ct_shard_part){.batch = rank, .whole = true, .none = rank >= n};
    }
    if (any_length) {
        return (ct_shard_part){.fill_from = rank - n, .fill = 1};
    }
    return fill_apart(shard, n, last_length);
}

size_t
ct_shard_count(const ct_shard *shard, size_t n)
{
    const size_t round = ct_shard_round(shard), rest = n % round;
    if (rest == 0 || shard->drop_last) {
        return n / round;
    }
    return n / round + (shard->even || (size_t)shard->rank < rest);
}
