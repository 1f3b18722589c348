#include "core/data/rows.h"
#include "ct_test.h"

#include <stdint.h>
#include <string.h>

static const int16_t values[] = {1, 2, 3};

static int
row_is(ct_pad_rule rule, size_t n, const int16_t *expected)
{
    int16_t row[5] = {7, 7, 7, 7, 7};
    rule.width = 5;
    rule.item_bytes = sizeof *row;
    ct_pad_row(&rule, row, values, n);
    return memcmp(row, expected, sizeof row) == 0;
}

static void
test_padding_is_on_the_other_side(void)
{
    CHECK(row_is((ct_pad_rule){0}, 3, (const int16_t[]){1, 2, 3, 7, 7}));
    CHECK(row_is((ct_pad_rule){.left = true}, 3, (const int16_t[]){7, 7, 1, 2, 3}));
}

static void
test_a_rotated_row_begins_with_the_last_item_or_another(void)
{
    const int16_t nine = 9;
    ct_pad_rule rule = {.rotate = true};
    CHECK(row_is(rule, 3, (const int16_t[]){3, 1, 2, 7, 7}));
    rule.first = &nine;
    CHECK(row_is(rule, 3, (const int16_t[]){9, 1, 2, 7, 7}));
    CHECK(row_is(rule, 1, (const int16_t[]){9, 7, 7, 7, 7}));
    rule.left = true;
    CHECK(row_is(rule, 2, (const int16_t[]){7, 7, 7, 9, 1}));
}

static void
test_nothing_leaves_the_row_as_it_is(void)
{
    const int16_t padding[] = {7, 7, 7, 7, 7};
    CHECK(row_is((ct_pad_rule){0}, 0, padding));
    CHECK(row_is((ct_pad_rule){.left = true, .rotate = true}, 0, padding));
}

int
main(void)
{
    test_padding_is_on_the_other_side();
    test_a_rotated_row_begins_with_the_last_item_or_another();
    test_nothing_leaves_the_row_as_it_is();
    return 0;
}
