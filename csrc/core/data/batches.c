#include "core/data/batches.h"

#include <inttypes.h>

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

/* How many samples the widest of the shapes holds whose length suffices. */
static int64_t
room_in_shapes(const ct_batch_rule *rule, int64_t longest)
{
    int64_t room = 0;
    for (size_t i = 0; i < rule->n_shapes; i++) {
        const ct_batch_shape *shape = &rule->shapes[i];
        if (longest <= shape->tokens && shape->sentences > room) {
            room = shape->sentences;
        }
    }
    return room;
}

/* How many samples a batch may have when its longest has that many tokens. */
static uint64_t
room_for(const ct_batch_rule *rule, int64_t longest)
{
    if (rule->n_shapes > 0) {
        return (uint64_t)room_in_shapes(rule, longest);
    }
    int64_t room = rule->max_sentences > 0 ? rule->max_sentences : INT64_MAX;
    if (rule->max_tokens > 0 && longest > 0 && rule->max_tokens / longest < room) {
        room = rule->max_tokens / longest;
    }
    return (uint64_t)room;
}

static ct_status
fail_too_long(const ct_batch_rule *rule, int64_t tokens, size_t at, ct_error *err)
{
    if (rule->n_shapes > 0) {
        return ct_fail(err, CT_EINVAL,
                       "the sample at position %zu has %" PRId64 " tokens, and none of "
                       "the %zu fixed shapes holds it; filter longer samples out",
                       at, tokens, rule->n_shapes);
    }
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
    const size_t multiple = rule->n_shapes > 0 ? 1 : (size_t)rule->multiple;
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
