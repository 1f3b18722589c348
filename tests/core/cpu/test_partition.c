#include "cpu/kernels.h"
#include "ct_random.h"
#include "ct_test.h"

#include "core/base/span.h"

static ct_partition
cut(const ct_span *spans, size_t n_spans)
{
    ct_partition partition;
    ct_partition_init(&partition, &spans[0].n, sizeof spans[0], n_spans);
    CHECK(partition.n_batches <= CT_PARTITION_MAX);
    return partition;
}

/* Walks all batches; every element must come by once, in order, and a part of a span
 * must begin at a multiple of CT_PARTITION_ALIGN. Returns the longest batch. */
static size_t
check_covers(const ct_span *spans, size_t n_spans)
{
    const ct_partition partition = cut(spans, n_spans);
    size_t span = 0, offset = 0, longest = 0;
    for (size_t b = 0; b < partition.n_batches; b++) {
        size_t elems = 0;
        ct_piece piece = ct_partition_start(&partition, b);
        while (ct_partition_next(&partition, b, &piece)) {
            while (offset == spans[span].n) {
                span++;
                offset = 0;
            }
            CHECK(piece.span == span && piece.offset == offset && piece.n != 0);
            CHECK(piece.offset % CT_PARTITION_ALIGN == 0);
            offset += piece.n;
            elems += piece.n;
            CHECK(offset <= spans[span].n);
        }
        CHECK(elems != 0);
        longest = elems > longest ? elems : longest;
    }
    while (span < n_spans && offset == spans[span].n) {
        span++;
        offset = 0;
    }
    CHECK(span == n_spans);
    return longest;
}

static void
test_nothing_makes_no_batch(void)
{
    const ct_span empty[3] = {{0}};
    CHECK(cut(empty, 1).n_batches == 0);
    CHECK(cut(empty, 3).n_batches == 0);
}

static void
test_small_spans_share_a_batch(void)
{
    ct_span spans[1000];
    for (size_t i = 0; i < 1000; i++) {
        spans[i] = (ct_span){NULL, 1000, CT_F32};
    }
    CHECK(check_covers(spans, 1000) < CT_BATCH_ELEMS + 2 * CT_PARTITION_ALIGN);
    CHECK(cut(spans, 1000).n_batches == 16);
}

static void
test_a_large_span_makes_many_batches_of_equal_length(void)
{
    const ct_span span = {NULL, 25000000, CT_F32};
    CHECK(check_covers(&span, 1) == CT_BATCH_ELEMS);
    CHECK(cut(&span, 1).n_batches == 382);
}

static void
test_a_huge_list_makes_larger_batches_and_not_more_of_them(void)
{
    const ct_span spans[3] = {
        {NULL, (size_t)1 << 40, CT_F32},
        {NULL, 12345,           CT_F32},
        {NULL, (size_t)1 << 33, CT_F32}
    };
    const size_t total = ((size_t)1 << 40) + 12345 + ((size_t)1 << 33);
    CHECK(check_covers(spans, 3) < total / 1000);
    CHECK(cut(spans, 3).n_batches > 1000);
}

static void
test_random_lists_are_covered_once(void)
{
    ct_random r = {7};
    ct_span spans[60];
    for (int round = 0; round < 3000; round++) {
        const size_t n_spans = 1 + ct_random_below(&r, 60);
        for (size_t i = 0; i < n_spans; i++) {
            static const size_t scales[] = {1, 2, 70, 3000, 65536, 65600, 500000};
            spans[i] =
                (ct_span){NULL, ct_random_below(&r, scales[round % 7] + 1), CT_F32};
        }
        check_covers(spans, n_spans);
    }
}

static void
test_lengths_around_a_full_batch(void)
{
    for (size_t first = 0; first < 2 * CT_PARTITION_ALIGN; first++) {
        for (size_t n = CT_BATCH_ELEMS - 70; n < CT_BATCH_ELEMS + 140; n++) {
            const ct_span spans[2] = {
                {NULL, first, CT_F32},
                {NULL, n,     CT_F32}
            };
            check_covers(spans, 2);
        }
    }
}

int
main(void)
{
    test_nothing_makes_no_batch();
    test_small_spans_share_a_batch();
    test_a_large_span_makes_many_batches_of_equal_length();
    test_a_huge_list_makes_larger_batches_and_not_more_of_them();
    test_random_lists_are_covered_once();
    test_lengths_around_a_full_batch();
    return 0;
}
