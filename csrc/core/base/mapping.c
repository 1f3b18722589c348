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

struct ct_spare {
    void *home; /* where its pages lie while nobody has them */
    size_t bytes;
    ct_spare *next;
};

/* ---- memory of the system ----------------------------------------------------------
 */

/* From a multiple of HUGE_PAGE on if it is as long: such pages cost a 512th of the
 * faults, and are moved without a look at each. Before and after it lies a page that is
 * not advised to be of a huge one, so that a touch of what is mapped beside it brings
 * no page here. NULL where there is no room. */
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
#ifdef MADV_HUGEPAGE
    (void)madvise(data, whole, MADV_HUGEPAGE);
#endif
    return data;
}

static void
unmap_pages(void *data, size_t bytes)
{
    const size_t page = ct_pages_round(1);
    (void)munmap((char *)data - page, ct_pages_round(bytes) + 2 * page);
}

/* Both stay mapped; where the pages were there are none then. */
static bool
move_pages(void *to, void *from, size_t bytes)
{
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    return mremap(from, bytes, bytes, flags, to) == to;
}

/* ---- pages that lie ready ----------------------------------------------------------
 */

static ct_spare *
spare_new(size_t bytes)
{
    ct_spare *spare = ct_calloc(1, sizeof *spare);
    if (spare == NULL) {
        return NULL;
    }
    spare->bytes = bytes;
    spare->home = map_pages(bytes);
    if (spare->home == NULL) {
        ct_free(spare);
        return NULL;
    }
    return spare;
}

static void
spare_free(ct_spare *spare)
{
    if (spare != NULL) {
        unmap_pages(spare->home, spare->bytes);
        ct_free(spare);
    }
}

static void
put(ct_spares *spares, ct_spare *spare)
{
    spare->next = spares->first;
    spares->first = spare;
}

/* The shortest that is long enough; else the longest, to make room for a longer one. */
static ct_spare **
best_link(ct_spares *spares, size_t bytes)
{
    ct_spare **best = &spares->first;
    for (ct_spare **at = best; *at != NULL; at = &(*at)->next) {
        const bool fits = (*at)->bytes >= bytes;
        const bool is_shorter = (*at)->bytes < (*best)->bytes;
        if ((*best)->bytes >= bytes ? fits && is_shorter : !is_shorter) {
            best = at;
        }
    }
    return best;
}

/* NULL where none is long enough: its new pages take the place of a shorter one's. */
static ct_spare *
take(ct_spares *spares, size_t bytes)
{
    ct_spare **link = best_link(spares, bytes);
    ct_spare *found = *link;
    if (found != NULL) {
        *link = found->next;
        if (found->bytes < bytes) {
            spare_free(found);
            found = NULL;
        }
    }
    return found;
}

void
ct_spares_discard(ct_spares *spares)
{
    if (spares->ops != NULL) {
        spares->ops->discard(spares);
        return;
    }
    for (ct_spare *spare = spares->first; spare != NULL; spare = spare->next) {
        (void)madvise(spare->home, spare->bytes, MADV_DONTNEED);
    }
}

void
ct_spares_close(ct_spares *spares)
{
    if (spares->ops != NULL) {
        spares->ops->discard(spares);
    }
    while (spares->first != NULL) {
        spare_free(take(spares, 0));
    }
}

/* ---- mappings ----------------------------------------------------------------------
 */

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

/* To where they came from, or to a place that is made for them. */
static bool
set_aside(ct_mapping *map, ct_spares *spares)
{
    ct_spare *spare = map->lent != NULL ? map->lent : spare_new(map->bytes);
    map->lent = NULL;
    if (spare == NULL) {
        return false;
    }
    put(spares, spare);
    return move_pages(spare->home, map->data, map->bytes);
}

void
ct_mapping_release(ct_mapping *map, ct_spares *spares)
{
    if (map->ops != NULL) {
        map->ops->release(map, spares);
        return;
    }
    if (map->bytes == 0) {
        return;
    }
    if (spares == NULL || !set_aside(map, spares)) {
        (void)madvise(map->data, map->bytes, MADV_DONTNEED);
    }
    if (map->poisoned) {
        memset(map->data, 0xFF, map->bytes);
    }
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

/* Whether there are pages: a touch brings one, be it the system's page of zeros. */
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

/* A process that locks all its memory has the pages from the beginning. */
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
obtain_pages(ct_mapping *map, ct_spares *spares)
{
    if (map->watched) {
        (void)mprotect(map->data, map->bytes, PROT_READ | PROT_WRITE);
    }
    ct_spare *spare = spares == NULL ? NULL : take(spares, map->bytes);
    if (spare != NULL && move_pages(map->data, spare->home, map->bytes)) {
        map->lent = spare;
    }
    else {
        spare_free(spare);
    }
}

ct_status
ct_mapping_obtain(ct_mapping *map, size_t bytes, ct_spares *spares, ct_error *err)
{
    if (map->ops != NULL) {
        return map->ops->obtain(map, bytes, spares, err);
    }
    if (map->bytes != 0) {
        obtain_pages(map, spares);
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
    spare_free(map->lent);
    *map = (ct_mapping){.data = NULL};
}

#ifdef __GLIBC__

#include <limits.h>
#include <malloc.h>

enum {
    OLD_MOST = 32 << 20, /* what releases before 2.35 accept for a block */
    LITTLE = 4 << 20     /* not worth the look at every free block */
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

static size_t
free_bytes(void)
{
#if __GLIBC_PREREQ(2, 33)
    return mallinfo2().fordblks;
#else
    return LITTLE;
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
