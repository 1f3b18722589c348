#include "core/data/batches.h"
#include "ct_random.h"
#include "ct_test.h"

#include <string.h>

enum {
    MOST = 64
};

/* The rule, word by word: try every end, take the last that fits, cut to a multiple. */
static size_t
slow_end(const ct_batch_rule *rule, const int64_t *tokens, size_t n, size_t start)
{
    size_t count = 0;
    int64_t longest = 0;
    for (size_t end = start + 1; end <= n; end++) {
        longest = tokens[end - 1] > longest ? tokens[end - 1] : longest;
        const int64_t size = (int64_t)(end - start);
        if ((rule->max_tokens > 0 && longest * size > rule->max_tokens) ||
            (rule->max_sentences > 0 && size > rule->max_sentences)) {
            break;
        }
        count = end - start;
    }
    const size_t multiple = (size_t)rule->multiple;
    return start + (count > multiple ? count - count % multiple : count);
}

static void
test_batches_are_those_of_the_rule(void)
{
    ct_random r = {88172645463325252u};
    int64_t tokens[MOST];
    for (int round = 0; round < 20000; round++) {
        const size_t n = 1 + ct_random_below(&r, MOST);
        const ct_batch_rule rule = {
            .max_tokens = (int64_t)ct_random_below(&r, 60) - 1,
            .max_sentences = (int64_t)ct_random_below(&r, n + 3) - 1,
            .multiple = 1 + (int64_t)ct_random_below(&r, 12),
        };
        const int64_t most = rule.max_tokens > 0 ? rule.max_tokens : 20;
        for (size_t i = 0; i < n; i++) {
            tokens[i] = (int64_t)ct_random_below(&r, (size_t)most + 1);
        }
        for (size_t start = 0, end; start < n; start = end) {
            CHECK(ct_batch_next(&rule, tokens, n, start, &end, NULL) == CT_OK);
            CHECK(end == slow_end(&rule, tokens, n, start));
        }
    }
}

static void
test_a_sample_beyond_max_tokens_is_named(void)
{
    const int64_t tokens[] = {3, 11, 2};
    const ct_batch_rule rule = {.max_tokens = 10, .multiple = 1};
    ct_error err;
    size_t end = 77;
    CHECK(ct_batch_next(&rule, tokens, 3, 0, &end, &err) == CT_OK && end == 1);
    CHECK(ct_batch_next(&rule, tokens, 3, 1, &end, &err) == CT_EINVAL && end == 1);
    CHECK(strstr(err.message, "Sentences lengths should not exceed max_tokens=10"));
    CHECK(strstr(err.message, "position 1 has 11"));
}

static void
test_no_length_overflows(void)
{
    const int64_t huge = INT64_MAX;
    const int64_t tokens[] = {huge, huge, INT64_MIN, 1};
    size_t end;
    ct_batch_rule rule = {.max_tokens = huge, .multiple = 1};
    CHECK(ct_batch_next(&rule, tokens, 4, 0, &end, NULL) == CT_OK && end == 1);
    rule.max_tokens = 0; /* no limit */
    CHECK(ct_batch_next(&rule, tokens, 4, 0, &end, NULL) == CT_OK && end == 4);
    rule.multiple = huge;
    CHECK(ct_batch_next(&rule, tokens, 4, 0, &end, NULL) == CT_OK && end == 4);
}

static void
test_a_multiple_below_one_is_rejected(void)
{
    ct_error err;
    const ct_batch_rule rule = {.multiple = 0};
    CHECK(ct_batch_rule_check(&rule, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "required_batch_size_multiple"));
}

int
main(void)
{
    test_batches_are_those_of_the_rule();
    test_a_sample_beyond_max_tokens_is_named();
    test_no_length_overflows();
    test_a_multiple_below_one_is_rejected();
    return 0;
}
