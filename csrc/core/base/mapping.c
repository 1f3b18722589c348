/* Mappings by mmap. The pages lie in a block of the arena and move from there to the
 * mapping and back, without a copy. */
#define _GNU_SOURCE /* MADV_HUGEPAGE */

#include "core/base/mapping.h"

#include "core/base/arena.h"
#include "core/base/pages.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    HUGE_PAGE = 2 << 20
};

/* ---- memory of the system -------------------------------------------------------- */

/* Maps `bytes`, aligned to HUGE_PAGE from that length on: huge pages cost a 512th of
 * the faults and move as a whole. A page without huge-page advice lies before and after
 * the memory, so that touching a neighbouring mapping never populates a huge page of
 * this one. NULL: no room. The ends left over by the alignment would count against the
 * process's limit of addresses, and are unmapped at once. */
static void *
map_pages(size_t bytes)
{
    const size_t whole = ct_pages_round(bytes), page = ct_pages_round(1);
    const size_t slack = bytes < HUGE_PAGE ? 0 : HUGE_PAGE;
    char *all = mmap(NULL, whole + slack + 2 * page, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == 0 || all == MAP_FAILED) {
        return NULL;
    }
    const size_t before = slack == 0 ? 0 : -(uintptr_t)(all + page) % HUGE_PAGE;
    char *data = all + page + before;
    if (before != 0) {
        (void)munmap(all, before);
    }
    if (slack != before) {
        (void)munmap(data + whole + page, slack - before);
    }
    (void)madvise(data, whole, MADV_HUGEPAGE);
    return data;
}

static void
unmap_pages(void *data, size_t bytes)
{
    const size_t page = ct_pages_round(1);
    (void)munmap((char *)data - page, ct_pages_round(bytes) + 2 * page);
}

/* ---- the cache ------------------------------------------------------------------- */

void
ct_block_cache_discard(ct_block_cache *cache)
{
    if (cache->ops != NULL) {
        cache->ops->discard(cache);
    }
    else {
        ct_arena_trim();
    }
}

/* ---- mappings -------------------------------------------------------------------- */

ct_status
ct_mapping_open(ct_mapping *map, size_t bytes, bool watched, ct_error *err)
{
    *map = (ct_mapping){.data = NULL};
    if (bytes == 0) {
        return CT_OK;
    }
    void *data = map_pages(bytes);
    if (data == NULL) {
        return ct_fail(err, CT_ENOMEM, "no room to map %zu bytes", bytes);
    }
    *map = (ct_mapping){.data = data, .bytes = bytes, .watched = watched};
    return CT_OK;
}

ct_status
ct_mapping_open_on(const ct_mapping_ops *ops, ct_mapping *map, size_t bytes,
                   bool watched, ct_error *err)
{
    if (ops == NULL) {
        return ct_mapping_open(map, bytes, watched, err);
    }
    *map = (ct_mapping){.data = NULL};
    const ct_status status = ops->open(map, bytes, err);
    if (status == CT_OK && bytes != 0) {
        map->bytes = bytes;
        map->watched = watched;
        map->ops = ops;
    }
    return status;
}

/* Moves the pages back to the arena. */
static bool
set_aside(ct_mapping *map)
{
    void *home = map->home;
    map->home = NULL;
    const bool moved = home != NULL && ct_arena_move(home, map->data, map->bytes);
    (void)ct_arena_free(home);
    return moved;
}

void
ct_mapping_release(ct_mapping *map, ct_block_cache *cache)
{
    if (map->ops != NULL) {
        map->ops->release(map, cache);
        return;
    }
    if (map->bytes == 0) {
        return;
    }
    if (!set_aside(map)) {
        (void)madvise(map->data, map->bytes, MADV_DONTNEED);
    }
    if (map->poisoned) {
        memset(map->data, 0xFF, map->bytes);
    }
    /* After the poison, as its writes would fault. */
    if (map->watched) {
        (void)mprotect(map->data, map->bytes, PROT_NONE);
    }
}

void
ct_mapping_poison(ct_mapping *map)
{
    if (map->ops == NULL && map->bytes != 0) {
        map->poisoned = true;
        memset(map->data, 0xFF, map->bytes);
    }
}

/* Whether the mapping has pages: any touch brings one, a read the system's zero page.
 */
static bool
has_pages(const ct_mapping *map)
{
    unsigned char present[4096];
    const size_t page = ct_pages_round(1), step = sizeof present * page;
    const size_t whole = ct_pages_round(map->bytes);
    bool found = false;
    for (size_t at = 0; !found && at < whole; at += step) {
        const size_t bytes = whole - at < step ? whole - at : step;
        const bool known = mincore((char *)map->data + at, bytes, present) == 0;
        for (size_t i = 0; known && !found && i < bytes / page; i++) {
            found = (present[i] & 1) != 0;
        }
    }
    return found;
}

/* Under mlockall the pages are there from the beginning and say nothing. */
void
ct_mapping_detect(ct_mapping *map)
{
    map->detects =
        map->ops == NULL && map->bytes != 0 && !map->poisoned && !has_pages(map);
}

bool
ct_mapping_touched(const ct_mapping *map)
{
    return map->detects && !map->watched && has_pages(map);
}

static void
obtain_pages(ct_mapping *map, ct_block_cache *cache)
{
    if (map->watched) {
        (void)mprotect(map->data, map->bytes, PROT_READ | PROT_WRITE);
    }
    map->home = cache == NULL ? NULL : ct_arena_alloc(map->bytes);
    if (map->home != NULL && !ct_arena_move(map->data, map->home, map->bytes)) {
        (void)ct_arena_free(map->home); /* the first touch brings new pages */
        map->home = NULL;
    }
}

ct_status
ct_mapping_obtain(ct_mapping *map, size_t bytes, ct_block_cache *cache, ct_error *err)
{
    if (map->ops != NULL) {
        return map->ops->obtain(map, bytes, cache, err);
    }
    if (map->bytes != 0) {
        obtain_pages(map, cache);
    }
    return CT_OK;
}

void
ct_mapping_close(ct_mapping *map)
{
    if (map->ops != NULL) {
        map->ops->close(map);
        *map = (ct_mapping){.data = NULL};
        return;
    }
    if (map->bytes != 0) {
        unmap_pages(map->data, map->bytes);
    }
    (void)ct_arena_free(map->home);
    *map = (ct_mapping){.data = NULL};
}

#ifdef __GLIBC__

#include <limits.h>
#include <malloc.h>

enum {
    OLD_MOST = 32 << 20, /* limit of glibc before 2.35 */
    LITTLE = 4 << 20     /* less is not worth visiting every free block */
};

static int
within_int(size_t bytes)
{
    return bytes < INT_MAX ? (int)bytes : INT_MAX;
}

bool
ct_malloc_keep(size_t longest, size_t end)
{
    if (getenv("MALLOC_MMAP_THRESHOLD_") != NULL ||
        getenv("MALLOC_TRIM_THRESHOLD_") != NULL) {
        return false;
    }
    return (mallopt(M_MMAP_THRESHOLD, within_int(longest)) == 1 ||
            mallopt(M_MMAP_THRESHOLD, OLD_MOST) == 1) &&
           mallopt(M_TRIM_THRESHOLD, within_int(end)) == 1;
}

#if !__GLIBC_PREREQ(2, 33)
/* Wheels are built for an older glibc than that of most processes. */
struct free_memory {
    size_t others[8], fordblks, keepcost;
};

struct free_memory mallinfo2_if_there(void) __asm__("mallinfo2") __attribute__((weak));
#endif

/* Without mallinfo2 the number is unknown, and mallinfo overflows at 2 GiB. */
static size_t
free_bytes(void)
{
#if __GLIBC_PREREQ(2, 33)
    return mallinfo2().fordblks;
#else
    return mallinfo2_if_there == NULL ? LITTLE : mallinfo2_if_there().fordblks;
#endif
}

void
ct_malloc_trim(void)
{
    if (free_bytes() >= LITTLE) {
        (void)malloc_trim(0);
    }
}

#else

bool
ct_malloc_keep(size_t longest, size_t end)
{
    (void)longest;
    (void)end;
    return false;
}

void
ct_malloc_trim(void)
{
}

#endif
