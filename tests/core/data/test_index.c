#include "core/data/batches.h"
#include "ct_test.h"

#include <stdint.h>
#include <string.h>

/* Two items of 3 and 2 elements of 4 bytes, 20 bytes of data. */
static const int32_t sizes[] = {3, 2};
static const int64_t offsets[] = {0, 12};

static ct_status
check_with(int32_t size, int64_t offset, size_t data_bytes, ct_error *err)
{
    const int32_t some_sizes[] = {3, size};
    const int64_t some_offsets[] = {0, offset};
    return ct_index_check(some_sizes, some_offsets, 2, 4, data_bytes, err);
}

static void
test_items_within_the_data_pass(void)
{
    CHECK(ct_index_check(sizes, offsets, 2, 4, 20, NULL) == CT_OK);
    CHECK(ct_index_check(NULL, NULL, 0, 4, 0, NULL) == CT_OK);
    CHECK(check_with(0, 20, 20, NULL) == CT_OK); /* empty, at the very end */
}

static void
test_tables_may_lie_at_any_alignment(void)
{
    char block[1 + sizeof sizes + sizeof offsets];
    memcpy(block + 1, sizes, sizeof sizes);
    memcpy(block + 1 + sizeof sizes, offsets, sizeof offsets);
    CHECK(ct_index_check(block + 1, block + 1 + sizeof sizes, 2, 4, 20, NULL) == CT_OK);
}

static void
test_the_first_bad_item_is_named(void)
{
    static const struct {
        int32_t size;
        int64_t offset;
        const char *text;
    } bad[] = {
        {3,         12,        "beyond the 20 bytes" },
        {2,         16,        "beyond the 20 bytes" },
        {0,         24,        "beyond the 20 bytes" },
        {INT32_MAX, 12,        "beyond the 20 bytes" },
        {1,         INT64_MAX, "no multiple of the 4"},
        {1,         13,        "no multiple of the 4"},
        {-1,        12,        "size -1"             },
        {1,         -4,        "offset -4"           },
        {INT32_MIN, INT64_MIN, "negative"            },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ct_error err;
        CHECK(check_with(bad[i].size, bad[i].offset, 20, &err) == CT_EINVAL);
        CHECK(strstr(err.message, "item 1 "));
        CHECK(strstr(err.message, bad[i].text));
    }
}

int
main(void)
{
    test_items_within_the_data_pass();
    test_tables_may_lie_at_any_alignment();
    test_the_first_bad_item_is_named();
    return 0;
}
