/* Orders by length beside an insertion sort, and rows moved beside a copy of all. */
#include "core/base/alloc.h"
#include "core/data/order.h"
#include "ct_random.h"
#include "ct_test.h"

#include <string.h>

enum {
    MOST = 300
};

/* Sorts a chunk the slow way, keeping equal ones in order. */
static void
sort_slowly(int64_t *order, size_t n, const int32_t *lengths)
{
    for (size_t i = 1; i < n; i++) {
        const int64_t moved = order[i];
        size_t at = i;
        for (; at > 0 && lengths[order[at - 1]] < lengths[moved]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = moved;
    }
}

static void
permute(ct_random *random, int64_t *order, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const size_t at = ct_random_below(random, i + 1);
        order[i] = order[at];
        order[at] = (int64_t)i;
    }
}

static void
test_each_chunk_is_sorted_and_equal_ones_stay(void)
{
    static const int32_t kinds[] = {2, 300, 70000, INT32_MAX};
    ct_random random = {.state = 5};
    for (int draw = 0; draw < 400; draw++) {
        const size_t n = ct_random_bits(&random) % MOST;
        const size_t chunk = 1 + ct_random_bits(&random) % (2 * MOST);
        const int32_t most = kinds[draw % 4];
        int32_t lengths[MOST];
        int64_t order[MOST] = {0}, expected[MOST];
        for (size_t i = 0; i < n; i++) {
            lengths[i] =
                (int32_t)(ct_random_bits(&random) % (uint64_t)most) - (draw & 1);
        }
        permute(&random, order, n);
        memcpy(expected, order, sizeof order);
        for (size_t at = 0; at < n; at += chunk) {
            sort_slowly(expected + at, n - at < chunk ? n - at : chunk, lengths);
        }
        CHECK(ct_order_by_length(order, n, lengths, n, chunk, NULL) == CT_OK);
        CHECK(memcmp(order, expected, n * sizeof *order) == 0);
    }
}

static void
test_the_longest_of_all_comes_first(void)
{
    const int32_t lengths[] = {3, 1, 4, 9, 2, 9, 5};
    int64_t order[] = {0, 1, 2, 3, 4, 5, 6};
    CHECK(ct_order_by_length(order, 7, lengths, 7, 3, NULL) == CT_OK);
    ct_order_longest_first(order, 7, lengths, 3);
    CHECK(memcmp(order, (const int64_t[]){3, 0, 1, 2, 5, 4, 6}, sizeof order) == 0);
    ct_order_longest_first(order, 7, lengths, SIZE_MAX);
    CHECK(order[0] == 3);
    ct_order_longest_first(order, 0, lengths, 1);
}

static void
test_what_is_no_order_is_rejected_and_stays(void)
{
    const int32_t lengths[] = {1, 2, 3};
    int64_t order[] = {0, 3, 1}, below[] = {0, -1};
    ct_error err;
    CHECK(ct_order_by_length(order, 3, lengths, 3, 3, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "index 3 at place 1") != NULL);
    CHECK(ct_order_by_length(below, 2, lengths, 3, 3, &err) == CT_EINVAL);
    CHECK(order[0] == 0 && order[1] == 3 && order[2] == 1);
    order[1] = 2;
    CHECK(ct_order_by_length(order, 3, lengths, 3, 0, &err) == CT_EINVAL);
    ct_alloc_fail_after(1);
    CHECK(ct_order_by_length(order, 3, lengths, 3, 3, &err) == CT_ENOMEM);
    ct_alloc_fail_after(0);
    CHECK(order[0] == 0 && order[1] == 2 && order[2] == 1);
}

static void
test_rows_go_to_their_places(void)
{
    ct_random random = {.state = 9};
    for (int draw = 0; draw < 300; draw++) {
        const size_t n = ct_random_bits(&random) % 40, bytes = 1 + (size_t)draw % 7;
        unsigned char rows[40 * 7], expected[40 * 7];
        int64_t to[40];
        permute(&random, to, n);
        for (size_t i = 0; i < n * bytes; i++) {
            rows[i] = (unsigned char)ct_random_bits(&random);
        }
        for (size_t i = 0; i < n; i++) {
            memcpy(expected + (size_t)to[i] * bytes, rows + i * bytes, bytes);
        }
        CHECK(ct_rows_move(rows, n, bytes, to, NULL) == CT_OK);
        CHECK(memcmp(rows, expected, n * bytes) == 0);
    }
}

static void
test_places_that_are_no_permutation_move_nothing(void)
{
    unsigned char rows[] = {1, 2, 3};
    ct_error err;
    CHECK(ct_rows_move(rows, 3, 1, (const int64_t[]){0, 0, 1}, &err) == CT_EINVAL);
    CHECK(ct_rows_move(rows, 3, 1, (const int64_t[]){0, 1, 3}, &err) == CT_EINVAL);
    CHECK(ct_rows_move(rows, 3, 1, (const int64_t[]){-1, 0, 1}, &err) == CT_EINVAL);
    for (size_t n = 1; n <= 2; n++) {
        ct_alloc_fail_after(n);
        CHECK(ct_rows_move(rows, 3, 1, (const int64_t[]){2, 0, 1}, &err) == CT_ENOMEM);
        ct_alloc_fail_after(0);
    }
    CHECK(rows[0] == 1 && rows[1] == 2 && rows[2] == 3);
}

int
main(void)
{
    test_each_chunk_is_sorted_and_equal_ones_stay();
    test_the_longest_of_all_comes_first();
    test_what_is_no_order_is_rejected_and_stays();
    test_rows_go_to_their_places();
    test_places_that_are_no_permutation_move_nothing();
    return 0;
}
