/* Memory at fixed addresses: what is released reads as zeros, and its pages are the
 * next mapping's. */
#include "core/base/alloc.h"
#include "core/base/mapping.h"
#include "core/base/region.h"
#include "ct_test.h"

#include <stdint.h>
#include <string.h>

enum {
    MIB = 1 << 20,
    SMALL = 3 * 4096 + 5,   /* in the middle of a page */
    LARGE = 5 * MIB + SMALL /* in the middle of a huge page */
};

static bool
is_all(const ct_mapping *map, unsigned char value)
{
    const unsigned char *bytes = map->data;
    return bytes[0] == value && memcmp(bytes, bytes + 1, map->bytes - 1) == 0;
}

/* With pages of the cache. */
static ct_mapping
open_filled(size_t bytes, int value, ct_block_cache *cache)
{
    ct_mapping map;
    CHECK(ct_mapping_open(&map, bytes, false, NULL) == CT_OK);
    CHECK(is_all(&map, 0));
    CHECK(ct_mapping_obtain(&map, bytes, cache, NULL) == CT_OK);
    memset(map.data, value, bytes);
    return map;
}

static void
released_pages_are_the_next_mappings(size_t bytes)
{
    ct_block_cache cache = {NULL};
    ct_mapping a = open_filled(bytes, 1, &cache), b = open_filled(bytes, 2, NULL);
    ct_mapping_release(&b, NULL);
    CHECK(is_all(&b, 0));
    for (int turn = 0; turn < 3; turn++) {
        ct_mapping_release(&a, &cache);
        CHECK(is_all(&a, 0));
        CHECK(ct_mapping_obtain(&b, b.bytes, &cache, NULL) == CT_OK);
        CHECK(is_all(&b, (unsigned char)(turn + 1)));
        memset(b.data, turn + 2, bytes);
        ct_mapping_release(&b, &cache);
        CHECK(is_all(&b, 0));
        CHECK(ct_mapping_obtain(&a, a.bytes, &cache, NULL) == CT_OK);
        CHECK(is_all(&a, (unsigned char)(turn + 2)));
    }
    ct_mapping_close(&a); /* with pages of the cache */
    ct_mapping_close(&b);
    ct_block_cache_discard(&cache);
}

static void
what_lies_ready_goes_back_to_the_system(void)
{
    enum {
        LONG = 64 * MIB
    };
    ct_block_cache cache = {NULL};
    const size_t before = ct_memory_resident();
    ct_mapping map = open_filled(LONG, 1, &cache);
    ct_mapping_release(&map, &cache);
    const size_t ready = ct_memory_resident();
    ct_block_cache_discard(&cache);
    const size_t after = ct_memory_resident();
    CHECK(before > 0 && ready > before + LONG / 2 && after < ready - LONG / 2);
    CHECK(ct_mapping_obtain(&map, map.bytes, &cache, NULL) == CT_OK);
    CHECK(is_all(&map, 0));
    ct_mapping_close(&map);
}

/* Mapped side by side, where a touch of one must not count for the other. */
static void
a_touch_after_the_release_is_told(size_t bytes)
{
    ct_block_cache cache = {NULL};
    ct_mapping a, b;
    CHECK(ct_mapping_open(&a, bytes, false, NULL) == CT_OK);
    CHECK(ct_mapping_open(&b, bytes, false, NULL) == CT_OK);
    ct_mapping_detect(&a);
    ct_mapping_detect(&b);
    CHECK(!ct_mapping_touched(&a) && !ct_mapping_touched(&b));
    for (int turn = 0; turn < 3; turn++) {
        CHECK(ct_mapping_obtain(&a, a.bytes, &cache, NULL) == CT_OK);
        memset(a.data, 1, bytes);
        CHECK(!ct_mapping_touched(&b));
        ct_mapping_release(&a, turn == 1 ? NULL : &cache);
        CHECK(!ct_mapping_touched(&a));
    }
    CHECK(((volatile unsigned char *)a.data)[bytes - 1] == 0); /* read */
    CHECK(ct_mapping_touched(&a) && !ct_mapping_touched(&b));
    ct_mapping_release(&a, NULL);
    CHECK(!ct_mapping_touched(&a));
    ((unsigned char *)b.data)[bytes / 2] = 1; /* written */
    CHECK(ct_mapping_touched(&b) && !ct_mapping_touched(&a));
    ct_mapping_close(&a);
    ct_mapping_close(&b);
    ct_block_cache_discard(&cache);
}

static void
poisoned_pages_are_nan_while_they_are_released(size_t bytes)
{
    ct_block_cache cache = {NULL};
    ct_mapping map;
    CHECK(ct_mapping_open(&map, bytes, false, NULL) == CT_OK);
    ct_mapping_poison(&map);
    ct_mapping_detect(&map);
    CHECK(is_all(&map, 0xFF));
    for (int turn = 0; turn < 2; turn++) {
        CHECK(ct_mapping_obtain(&map, map.bytes, &cache, NULL) == CT_OK);
        memset(map.data, turn, bytes);
        ct_mapping_release(&map, &cache);
        CHECK(is_all(&map, 0xFF) && !ct_mapping_touched(&map));
    }
    ct_mapping_close(&map);
    ct_block_cache_discard(&cache);
}

static void
without_memory_for_a_cached_block_pages_are_the_systems(void)
{
    ct_block_cache cache = {NULL};
    ct_alloc_fail_after(1);
    ct_mapping map = open_filled(SMALL, 1, &cache);
    ct_mapping_release(&map, &cache);
    ct_alloc_fail_after(0);
    CHECK(map.home == NULL && is_all(&map, 0));
    ct_mapping_close(&map);
}

static void
what_cannot_be_mapped_is_rejected(void)
{
    ct_mapping map;
    ct_error err;
    CHECK(ct_mapping_open(&map, SIZE_MAX / 2, false, &err) == CT_ENOMEM);
    CHECK(strstr(err.message, "no room to map") != NULL);
    ct_mapping_close(&map);
}

int
main(void)
{
    released_pages_are_the_next_mappings(SMALL);
    released_pages_are_the_next_mappings(LARGE);
    what_lies_ready_goes_back_to_the_system();
    without_memory_for_a_cached_block_pages_are_the_systems();
    what_cannot_be_mapped_is_rejected();
    a_touch_after_the_release_is_told(SMALL);
    a_touch_after_the_release_is_told(LARGE);
    poisoned_pages_are_nan_while_they_are_released(SMALL);
    poisoned_pages_are_nan_while_they_are_released(LARGE);
    return 0;
}
