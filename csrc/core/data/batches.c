/* fairseq's data sets: batches and blocks, in one pass over the lengths, and the check
 * of a table before the first read.
 *
 * Every loop moves only forward: the cost is that of the samples and the blocks. Limits
 * are compared by division or subtraction, so that no sum or product overflows. */
#include "core/data/batches.h"

#include <inttypes.h>
#include <string.h>

ct_status
ct_batch_rule_check(const ct_batch_rule *rule, ct_error *err)
{
    if (!(rule->multiple >= 1)) {
        return ct_fail(err, CT_EINVAL,
                       "required_batch_size_multiple must be at least 1, got %" PRId64,
                       rule->multiple);
    }
    return CT_OK;
}

/* How many samples a batch may have whose longest sample has `longest` tokens. */
static uint64_t
room_for(const ct_batch_rule *rule, int64_t longest)
{
    int64_t room = rule->max_sentences > 0 ? rule->max_sentences : INT64_MAX;
    if (rule->max_tokens > 0 && longest > 0 && rule->max_tokens / longest < room) {
        room = rule->max_tokens / longest;
    }
    return (uint64_t)room;
}

static ct_status
fail_too_long(const ct_batch_rule *rule, int64_t tokens, size_t at, ct_error *err)
{
    return ct_fail(err, CT_EINVAL,
                   "Sentences lengths should not exceed max_tokens=%" PRId64
                   ", but the sample at position %zu has %" PRId64
                   "; raise max_tokens, or filter longer samples out",
                   rule->max_tokens, at, tokens);
}

ct_status
ct_batch_next(const ct_batch_rule *rule, const int64_t *tokens, size_t n, size_t start,
              size_t *end, ct_error *err)
{
    const size_t multiple = (size_t)rule->multiple;
    int64_t longest = 0;
    uint64_t room = room_for(rule, longest);
    size_t at = start;
    for (; at < n; at++) {
        if (tokens[at] > longest) {
            longest = tokens[at];
            room = room_for(rule, longest); /* divides, but only at a new maximum */
        }
        if (at - start >= room) {
            break;
        }
    }
    const size_t count = at - start;
    if (count == 0) {
        return fail_too_long(rule, tokens[start], start, err);
    }
    *end = start + (count > multiple ? count - count % multiple : count);
    return CT_OK;
}

ct_status
ct_blocks_check(const ct_block_rule *rule, const int64_t *sizes, size_t n,
                ct_error *err)
{
    if (rule->mode != CT_BREAK_EOS && !(rule->block_tokens >= 1)) {
        return ct_fail(err, CT_EINVAL,
                       "block_size must be at least 1 in this break mode, got %" PRId64,
                       rule->block_tokens);
    }
    int64_t total = 0;
    for (size_t i = 0; i < n; i++) {
        if (sizes[i] < 0 || sizes[i] > INT64_MAX - total) {
            return ct_fail(err, CT_EINVAL,
                           "item %zu has size %" PRId64
                           ": sizes are 0 or more and their sum has 63 bits",
                           i, sizes[i]);
        }
        total += sizes[i];
    }
    return CT_OK;
}

/* The items, and room for the blocks that are cut from the items. */
typedef struct writer {
    const int64_t *sizes;
    size_t n;
    ct_block *blocks;
    size_t room, count;
} writer;

static void
put(writer *w, ct_block block)
{
    if (w->count < w->room) {
        w->blocks[w->count] = block;
    }
    w->count++;
}

/* Whole items [first, end), beginning with token `start` of the stream. */
static void
put_items(writer *w, size_t first, size_t end, int64_t start, int64_t tokens)
{
    put(w, (ct_block){.start = start,
                      .end = start + tokens,
                      .first = (int64_t)first,
                      .last = (int64_t)end - 1});
}

static void
cut_eos(writer *w)
{
    int64_t start = 0;
    for (size_t i = 0; i < w->n; i++) {
        put_items(w, i, i + 1, start, w->sizes[i]);
        start += w->sizes[i];
    }
}

/* Moves on by `tokens`, from `*offset` in item *item. */
static void
advance(const writer *w, size_t *item, int64_t *offset, int64_t tokens)
{
    while (tokens >= w->sizes[*item] - *offset) {
        tokens -= w->sizes[*item] - *offset;
        *offset = 0;
        if (++*item == w->n) {
            return; /* the end of the stream */
        }
    }
    *offset += tokens;
}

static void
cut_none(writer *w, int64_t block_tokens)
{
    int64_t total = 0, offset = 0, tokens;
    size_t item = 0;
    for (size_t i = 0; i < w->n; i++) {
        total += w->sizes[i];
    }
    if (total > 0) {
        advance(w, &item, &offset, 0); /* past empty items */
    }
    for (int64_t start = 0; start < total; start += tokens) {
        tokens = total - start < block_tokens ? total - start : block_tokens;
        ct_block block = {.start = start,
                          .end = start + tokens,
                          .first = (int64_t)item,
                          .offset = offset};
        advance(w, &item, &offset, tokens - 1);
        block.last = (int64_t)item;
        put(w, block);
        advance(w, &item, &offset, 1);
    }
}

/* Whole items for as long as the block has room; with `separator` >= 0 an item of that
 * size ends a document, and documents of at most `least` tokens are dropped. */
static void
cut_whole(writer *w, int64_t block_tokens, int64_t separator, int64_t least)
{
    int64_t start = 0, tokens = 0;
    size_t first = 0;
    for (size_t i = 0; i < w->n; i++) {
        const int64_t size = w->sizes[i];
        const int ends = size == separator;
        if (ends || (tokens > 0 && size > block_tokens - tokens)) {
            if (tokens > least) {
                put_items(w, first, i, start, tokens);
            }
            first = i + (size_t)ends;
            start += tokens + (ends ? size : 0);
            tokens = 0;
        }
        tokens += ends ? 0 : size;
    }
    if (tokens > least) {
        put_items(w, first, w->n, start, tokens);
    }
}

size_t
ct_blocks_cut(const ct_block_rule *rule, const int64_t *sizes, size_t n,
              ct_block *blocks, size_t room)
{
    writer w = {.sizes = sizes, .n = n, .blocks = blocks, .room = room};
    switch (rule->mode) {
    case CT_BREAK_NONE:
        cut_none(&w, rule->block_tokens);
        break;
    case CT_BREAK_COMPLETE:
        cut_whole(&w, rule->block_tokens, -1, 0);
        break;
    case CT_BREAK_COMPLETE_DOC:
        cut_whole(&w, rule->block_tokens, rule->separator_tokens, 1);
        break;
    case CT_BREAK_EOS:
        cut_eos(&w);
        break;
    }
    return w.count;
}

/* ---- the table of a memory-mapped data set --------------------------------------- */

/* The file may be cut short or come from anywhere: once checked, an item is read
 * without a bound of its own. Sums and products are compared by subtraction and in 64
 * bits, so that no entry overflows past the check. */

static ct_status
fail_item(size_t i, int32_t size, int64_t offset, size_t element_bytes,
          size_t data_bytes, ct_error *err)
{
    if (size < 0 || offset < 0) {
        return ct_fail(err, CT_EINVAL,
                       "item %zu has size %" PRId32 " at offset %" PRId64
                       ": neither may be negative",
                       i, size, offset);
    }
    if (offset % (int64_t)element_bytes != 0) {
        return ct_fail(err, CT_EINVAL,
                       "item %zu begins at byte %" PRId64
                       ", which is no multiple of the %zu bytes of an element",
                       i, offset, element_bytes);
    }
    return ct_fail(err, CT_EINVAL,
                   "item %zu has %" PRId32 " elements of %zu bytes at offset %" PRId64
                   ", which end beyond the %zu bytes of the data file",
                   i, size, element_bytes, offset, data_bytes);
}

ct_status
ct_index_check(const void *sizes, const void *offsets, size_t n, size_t element_bytes,
               size_t data_bytes, ct_error *err)
{
    const unsigned char *size_at = sizes, *offset_at = offsets;
    for (size_t i = 0; i < n; i++) {
        int32_t size;
        int64_t offset;
        memcpy(&size, size_at + i * sizeof size, sizeof size);
        memcpy(&offset, offset_at + i * sizeof offset, sizeof offset);
        if (size < 0 || offset < 0 || (uint64_t)offset % element_bytes != 0 ||
            (uint64_t)offset > data_bytes ||
            (uint64_t)size * element_bytes > data_bytes - (uint64_t)offset) {
            return fail_item(i, size, offset, element_bytes, data_bytes, err);
        }
    }
    return CT_OK;
}
