/* Mappings by mmap, and a block cache by mremap: cached pages lie at the home address
 * of their block and move to a mapping and back, without a copy. */
#define _GNU_SOURCE /* MADV_HUGEPAGE, mremap */

#include "core/base/mapping.h"

#include "core/base/alloc.h"
#include "core/base/pages.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 /* of Linux 5.7: an older one moves no pages */
#endif

enum {
    HUGE_PAGE = 2 << 20
};

/* A block may outlive the mapping that filled it, so a block needs addresses for
 * itself. */
struct ct_cached_block {
    void *home; /* address of the pages while no mapping has them */
    size_t bytes;
    ct_cached_block *next;
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

/* Moves the pages; both ranges stay mapped, `from` then without pages. */
static bool
move_pages(void *to, void *from, size_t bytes)
{
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    return mremap(from, bytes, bytes, flags, to) == to;
}

/* ---- cached pages ---------------------------------------------------------------- */

static ct_cached_block *
cached_block_new(size_t bytes)
{
    ct_cached_block *block = ct_calloc(1, sizeof *block);
    if (block == NULL) {
        return NULL;
    }
    block->bytes = bytes;
    block->home = map_pages(bytes);
    if (block->home == NULL) {
        ct_free(block);
        return NULL;
    }
    return block;
}

static void
cached_block_free(ct_cached_block *block)
{
    if (block != NULL) {
        unmap_pages(block->home, block->bytes);
        ct_free(block);
    }
}

/* At the front: the last released pages are the likeliest to be in the caches. */
static void
put(ct_block_cache *cache, ct_cached_block *block)
{
    block->next = cache->first;
    cache->first = block;
}

/* The shortest block of at least `bytes`; without one the longest. */
static ct_cached_block **
best_link(ct_block_cache *cache, size_t bytes)
{
    ct_cached_block **best = &cache->first;
    for (ct_cached_block **at = best; *at != NULL; at = &(*at)->next) {
        const bool fits = (*at)->bytes >= bytes;
        const bool is_shorter = (*at)->bytes < (*best)->bytes;
        if ((*best)->bytes >= bytes ? fits && is_shorter : !is_shorter) {
            best = at;
        }
    }
    return best;
}

/* Takes out a block of at least `bytes`. NULL: none; the longest is freed then, as new
 * pages are about to take its place. */
static ct_cached_block *
take(ct_block_cache *cache, size_t bytes)
{
    ct_cached_block **link = best_link(cache, bytes);
    ct_cached_block *found = *link;
    if (found != NULL) {
        *link = found->next;
        if (found->bytes < bytes) {
            cached_block_free(found);
            found = NULL;
        }
    }
    return found;
}

/* The addresses stay: a block without pages still serves a mapping, and the first touch
 * brings new pages. */
void
ct_block_cache_discard(ct_block_cache *cache)
{
    if (cache->ops != NULL) {
        cache->ops->discard(cache);
        return;
    }
    for (ct_cached_block *block = cache->first; block != NULL; block = block->next) {
        (void)madvise(block->home, block->bytes, MADV_DONTNEED);
    }
}

void
ct_block_cache_close(ct_block_cache *cache)
{
    if (cache->ops != NULL) {
        cache->ops->discard(cache);
    }
    while (cache->first != NULL) {
        cached_block_free(take(cache, 0));
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
    if (ops == NULL || bytes == 0) {
        return ct_mapping_open(map, bytes, watched, err);
    }
    *map = (ct_mapping){.data = NULL};
    const ct_status status = ops->open(map, bytes, err);
    if (status == CT_OK) {
        map->bytes = bytes;
        map->watched = watched;
        map->ops = ops;
    }
    return status;
}

/* Moves the pages to the cache: to the home of their block, or of a new one. */
static bool
set_aside(ct_mapping *map, ct_block_cache *cache)
{
    ct_cached_block *block =
        map->block != NULL ? map->block : cached_block_new(map->bytes);
    map->block = NULL;
    if (block == NULL) {
        return false;
    }
    put(cache, block);
    return move_pages(block->home, map->data, map->bytes);
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
    /* Without a cache, or if the pages did not move, the memory returns to the
     * system. */
    if (cache == NULL || !set_aside(map, cache)) {
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
    ct_cached_block *block = cache == NULL ? NULL : take(cache, map->bytes);
    if (block != NULL && move_pages(map->data, block->home, map->bytes)) {
        map->block = block;
    }
    else {
        /* An old kernel moves no pages; the first touch then brings new ones. */
        cached_block_free(block);
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
    /* The pages were at the mapping's addresses and are unmapped by now; the block's
     * addresses are left. */
    cached_block_free(map->block);
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
