#include "core/base/alloc.h"
#include "core/data/rows.h"
#include "ct_test.h"

#include <stdint.h>
#include <string.h>

enum {
    MAX_ROWS = 300,
    MAX_WIDTH = 40,
    FILL = -100
};

static int32_t expected[MAX_ROWS][MAX_WIDTH];

/* Appends n rows of `width` numbers and notes them in `expected`. */
static void
append(ct_rows *rows, size_t n, size_t width)
{
    int32_t batch[MAX_ROWS * MAX_WIDTH];
    for (size_t r = 0; r < n; r++) {
        for (size_t c = 0; c < MAX_WIDTH; c++) {
            const size_t row = rows->n_rows + r;
            expected[row][c] = c < width ? (int32_t)(row * 1000 + c) : FILL;
            if (c < width) {
                batch[r * width + c] = expected[row][c];
            }
        }
    }
    CHECK(ct_rows_append(rows, batch, n, width, NULL) == CT_OK);
}

static void
check_equal(ct_rows *rows)
{
    const int32_t fill = FILL;
    CHECK(ct_rows_spread(rows, &fill, sizeof fill, NULL) == CT_OK);
    const int32_t *got = rows->region.data;
    for (size_t r = 0; r < rows->n_rows; r++) {
        for (size_t c = 0; c < rows->width; c++) {
            CHECK(got[r * rows->width + c] == expected[r][c]);
        }
    }
}

/* A small generator of its own: the test is the same on every C library. */
static size_t
next(uint32_t *seed, size_t below)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 16) % below;
}

static void
test_any_order_of_widths(void)
{
    for (uint32_t trial = 0; trial < 200; trial++) {
        uint32_t seed = trial;
        ct_rows rows = {.position_bytes = sizeof(int32_t),
                        .expected_rows = trial % 2 ? 100 : 0};
        while (rows.n_rows < 200 && next(&seed, 20) != 0) {
            append(&rows, next(&seed, 9), next(&seed, MAX_WIDTH));
        }
        check_equal(&rows);
        ct_rows_fini(&rows);
    }
}

static void
test_appending_goes_on_after_spreading(void)
{
    ct_rows rows = {.position_bytes = sizeof(int32_t)};
    append(&rows, 3, 2);
    append(&rows, 2, 5);
    check_equal(&rows);
    append(&rows, 4, 7);
    check_equal(&rows);
    ct_rows_fini(&rows);
}

static void
test_append_after_reserve_needs_no_memory(void)
{
    const int32_t values[6] = {1, 2, 3, 4, 5, 6};
    ct_rows rows = {.position_bytes = sizeof values[0]};
    CHECK(ct_rows_reserve(&rows, 2, 3, NULL) == CT_OK);
    ct_alloc_fail_after(1);
    CHECK(ct_rows_append(&rows, values, 2, 3, NULL) == CT_OK);
    ct_alloc_fail_after(0);
    CHECK(rows.n_rows == 2 && memcmp(rows.region.data, values, sizeof values) == 0);
    ct_rows_fini(&rows);
}

static void
test_rows_move_to_a_file_and_stay_equal(void)
{
    ct_rows rows = {
        .position_bytes = sizeof(int32_t), .spill_bytes = 4096, .spill_folder = "."};
    for (size_t i = 0; i < 30; i++) {
        append(&rows, 8, 10 + i);
    }
    CHECK(rows.region.has_file);
    check_equal(&rows);
    ct_rows_fini(&rows);
}

static void
test_missing_folder_is_an_error_that_changes_nothing(void)
{
    ct_error err;
    const int32_t value = 7;
    ct_rows rows = {.position_bytes = sizeof value,
                    .spill_bytes = 4,
                    .spill_folder = "/does/not/exist"};
    append(&rows, 1, 1);
    CHECK(ct_rows_append(&rows, &value, 1, 1, &err) == CT_EIO);
    CHECK(err.os_error != 0 && strstr(err.message, "/does/not/exist") != NULL);
    CHECK(rows.n_rows == 1 && rows.used_bytes == sizeof value);
    ct_rows_fini(&rows);
}

static void
test_impossible_size_is_an_error_that_changes_nothing(void)
{
    ct_error err;
    ct_region region = {0};
    CHECK(ct_region_reserve(&region, 100, NULL) == CT_OK);
    void *const before = region.data;
    CHECK(ct_region_reserve(&region, SIZE_MAX, &err) == CT_ENOMEM);
    CHECK(ct_region_reserve(&region, SIZE_MAX / 4, &err) == CT_ENOMEM);
    CHECK(region.data == before);
    ct_region_fini(&region);
}

static void
test_failed_allocation_changes_nothing(void)
{
    const int32_t value = 7;
    ct_rows rows = {.position_bytes = sizeof value};
    ct_alloc_fail_after(1);
    CHECK(ct_rows_append(&rows, &value, 1, 1, NULL) == CT_ENOMEM);
    ct_alloc_fail_after(0);
    CHECK(rows.n_rows == 0 && rows.used_bytes == 0 && rows.n_runs == 0);
    append(&rows, 2, 3);
    check_equal(&rows);
    ct_rows_fini(&rows);
}

static void
test_expected_rows_are_reserved_at_once(void)
{
    ct_rows rows = {.position_bytes = sizeof(int32_t), .expected_rows = 250};
    append(&rows, 50, 40);
    void *const first = rows.region.data;
    for (size_t i = 0; i < 4; i++) {
        append(&rows, 50, 40);
    }
    CHECK(rows.region.data == first);
    check_equal(&rows);
    CHECK(rows.region.data == first);
    ct_rows_fini(&rows);
}

int
main(void)
{
    test_any_order_of_widths();
    test_appending_goes_on_after_spreading();
    test_append_after_reserve_needs_no_memory();
    test_rows_move_to_a_file_and_stay_equal();
    test_missing_folder_is_an_error_that_changes_nothing();
    test_impossible_size_is_an_error_that_changes_nothing();
    test_failed_allocation_changes_nothing();
    test_expected_rows_are_reserved_at_once();
    return 0;
}
