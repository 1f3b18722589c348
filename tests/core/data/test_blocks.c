#include "core/data/batches.h"
#include "ct_random.h"
#include "ct_test.h"

#include <string.h>

enum {
    MOST = 24
};

static size_t
cut(ct_break_mode mode, int64_t tokens, const int64_t *sizes, size_t n, ct_block *out)
{
    const ct_block_rule rule = {
        .mode = mode, .block_tokens = tokens, .separator_tokens = 1};
    CHECK(ct_blocks_check(&rule, sizes, n, NULL) == CT_OK);
    return ct_blocks_cut(&rule, sizes, n, out, 10 * MOST);
}

/* The item of a token of the stream and the position in it, looked up one by one. */
static int64_t
slow_find(const int64_t *sizes, int64_t token, int64_t *offset)
{
    int64_t item = 0;
    for (; token >= sizes[item]; item++) {
        token -= sizes[item];
    }
    *offset = token;
    return item;
}

static void
check_places(const ct_block *blocks, size_t count, const int64_t *sizes)
{
    for (size_t i = 0; i < count; i++) {
        int64_t offset, end;
        CHECK(blocks[i].start < blocks[i].end);
        CHECK(blocks[i].first == slow_find(sizes, blocks[i].start, &offset));
        CHECK(blocks[i].offset == offset);
        CHECK(blocks[i].last == slow_find(sizes, blocks[i].end - 1, &end));
    }
}

static void
test_blocks_begin_and_end_where_the_stream_says(void)
{
    ct_random r = {88172645463325252u};
    int64_t sizes[MOST];
    ct_block blocks[10 * MOST];
    for (int round = 0; round < 3000; round++) {
        const size_t n = 1 + ct_random_below(&r, MOST);
        for (size_t i = 0; i < n; i++) {
            sizes[i] = 1 + (int64_t)ct_random_below(&r, 9);
        }
        const int64_t tokens = 1 + (int64_t)ct_random_below(&r, 12);
        for (int mode = CT_BREAK_NONE; mode <= CT_BREAK_EOS; mode++) {
            check_places(blocks, cut((ct_break_mode)mode, tokens, sizes, n, blocks),
                         sizes);
        }
    }
}

static void
check_blocks(ct_break_mode mode, const int64_t *expected, size_t count)
{
    static const int64_t sizes[] = {3, 5, 1, 9, 2, 2, 1};
    ct_block blocks[10 * MOST];
    CHECK(cut(mode, 6, sizes, 7, blocks) == count);
    for (size_t i = 0; i < count; i++) {
        CHECK(blocks[i].start == expected[2 * i]);
        CHECK(blocks[i].end == expected[2 * i + 1]);
    }
}

static void
test_each_mode_breaks_by_its_rule(void)
{
    static const int64_t none[] = {0, 6, 6, 12, 12, 18, 18, 23};
    static const int64_t whole[] = {0, 3, 3, 9, 9, 18, 18, 23};
    static const int64_t documents[] = {0, 3, 3, 8, 9, 18, 18, 22};
    static const int64_t each[] = {0, 3, 3, 8, 8, 9, 9, 18, 18, 20, 20, 22, 22, 23};
    check_blocks(CT_BREAK_NONE, none, 4);
    check_blocks(CT_BREAK_COMPLETE, whole, 4);
    check_blocks(CT_BREAK_COMPLETE_DOC, documents, 4);
    check_blocks(CT_BREAK_EOS, each, 7);
}

static void
test_empty_items_are_passed_over(void)
{
    static const int64_t sizes[] = {0, 3, 0, 0, 2, 0};
    ct_block blocks[10 * MOST];
    CHECK(cut(CT_BREAK_NONE, 3, sizes, 6, blocks) == 2);
    check_places(blocks, 2, sizes);
    CHECK(cut(CT_BREAK_NONE, 3, sizes, 1, blocks) == 0);
    CHECK(cut(CT_BREAK_NONE, 3, sizes, 0, blocks) == 0);
    CHECK(cut(CT_BREAK_EOS, 0, sizes, 6, blocks) == 6);
    CHECK(blocks[2].start == 3 && blocks[2].end == 3 && blocks[2].first == 2);
}

static void
test_blocks_beyond_the_room_are_counted_only(void)
{
    static const int64_t sizes[] = {4, 4};
    const ct_block_rule rule = {.mode = CT_BREAK_NONE, .block_tokens = 2};
    ct_block blocks[2] = {{.end = -1}, {.end = -1}};
    CHECK(ct_blocks_cut(&rule, sizes, 2, blocks, 1) == 4);
    CHECK(blocks[0].end == 2 && blocks[1].end == -1);
}

static void
test_what_cannot_be_is_rejected(void)
{
    static const int64_t negative[] = {3, -1}, large[] = {1, INT64_MAX};
    ct_error err;
    ct_block_rule rule = {.mode = CT_BREAK_NONE, .block_tokens = 0};
    CHECK(ct_blocks_check(&rule, negative, 1, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "block_size"));
    rule.mode = CT_BREAK_EOS;
    CHECK(ct_blocks_check(&rule, negative, 2, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "item 1 has size -1"));
    CHECK(ct_blocks_check(&rule, large, 2, &err) == CT_EINVAL);
}

int
main(void)
{
    test_blocks_begin_and_end_where_the_stream_says();
    test_each_mode_breaks_by_its_rule();
    test_empty_items_are_passed_over();
    test_blocks_beyond_the_room_are_counted_only();
    test_what_cannot_be_is_rejected();
    return 0;
}
