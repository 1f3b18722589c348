#include "core/base/alloc.h"
#include "ct_test.h"

#include <stdint.h>
#include <string.h>

static void
test_blocks_are_aligned_to_a_cache_line(void)
{
    static const size_t sizes[] = {0, 1, 63, 64, 65, 1000, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *block = ct_alloc(sizes[i]);
        CHECK(block != NULL && (uintptr_t)block % 64 == 0);
        memset(block, 1, sizes[i]);
        ct_free(block);
    }
}

static void
test_calloc_zeroes(void)
{
    char *block = ct_calloc(3, 100);
    CHECK(block != NULL);
    for (size_t i = 0; i < 300; i++) {
        CHECK(block[i] == 0);
    }
    ct_free(block);
}

static void
test_sizes_that_overflow_are_rejected(void)
{
    CHECK(ct_alloc(SIZE_MAX) == NULL);
    CHECK(ct_alloc(SIZE_MAX - 63) == NULL);
    CHECK(ct_calloc(SIZE_MAX / 2, 3) == NULL);

    void *block = NULL;
    size_t capacity = 0;
    ct_error err;
    CHECK(ct_grow(&block, &capacity, SIZE_MAX / 4, 8, &err) == CT_ENOMEM);
    CHECK(block == NULL && capacity == 0 && err.code == CT_ENOMEM);
}

static void
test_the_nth_allocation_fails_and_all_after_it(void)
{
    ct_alloc_fail_after(3);
    void *first = ct_alloc(1);
    void *second = ct_calloc(1, 1);
    CHECK(first != NULL && second != NULL);
    CHECK(ct_alloc(1) == NULL && ct_calloc(1, 1) == NULL && ct_alloc(1) == NULL);
    ct_alloc_fail_after(0);
    void *after = ct_alloc(1);
    CHECK(after != NULL);
    ct_free(after);
    ct_free(second);
    ct_free(first);
}

static void
test_grow_keeps_the_content_and_doubles(void)
{
    int *items = NULL;
    size_t capacity = 0;
    for (int n = 1; n <= 1000; n++) {
        const size_t before = capacity;
        CHECK(ct_grow((void **)&items, &capacity, (size_t)n, sizeof *items, NULL) ==
              CT_OK);
        CHECK(capacity == before || capacity >= 2 * before);
        items[n - 1] = n;
    }
    for (int n = 1; n <= 1000; n++) {
        CHECK(items[n - 1] == n);
    }
    ct_free(items);
}

static void
test_a_failed_grow_changes_nothing(void)
{
    int *items = NULL;
    size_t capacity = 0;
    CHECK(ct_grow((void **)&items, &capacity, 4, sizeof *items, NULL) == CT_OK);
    items[3] = 7;
    int *const before = items;
    ct_error err;
    ct_alloc_fail_after(1);
    CHECK(ct_grow((void **)&items, &capacity, 5, sizeof *items, &err) == CT_ENOMEM);
    ct_alloc_fail_after(0);
    CHECK(items == before && capacity == 4 && items[3] == 7);
    CHECK(strstr(err.message, "8 items of 4 bytes") != NULL);
    ct_free(items);
}

int
main(void)
{
    test_blocks_are_aligned_to_a_cache_line();
    test_calloc_zeroes();
    test_sizes_that_overflow_are_rejected();
    test_the_nth_allocation_fails_and_all_after_it();
    test_grow_keeps_the_content_and_doubles();
    test_a_failed_grow_changes_nothing();
    return 0;
}
