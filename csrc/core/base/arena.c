/* A range of addresses is in use, or free with pages, or empty. Ranges are linked in
 * the order of their addresses; free and empty ranges also in a list of their state.
 * Adjacent free ranges are merged, and adjacent empty ranges.
 *
 * Moved pages bring their own mapping along, so that a range may consist of several of
 * the system's mappings, which the system does not merge, and of which a process has
 * 65,530 at most (vm.max_map_count). After so many moves each range that is not in use
 * is mapped anew. The content of moved pages is never needed.
 *
 * A block may never have been touched, so a free range may be without pages: the block
 * that gets the range has page faults then. There is no advice to use huge pages, as
 * the system would fill empty ranges with pages, too. */
#define _GNU_SOURCE /* mremap */

#include "core/base/arena.h"

#include "core/base/alloc.h"
#include "core/base/imports.h"
#include "core/base/pages.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 /* of Linux 5.7: an older system moves no pages */
#endif

enum {
    GRAIN = 16 << 10,  /* ranges are of multiples, as shorter ones do not pay a move */
    LEAST = 128 << 10, /* shorter blocks of a library are malloc's */
    OF_MEMORY = 4,     /* addresses are as many times the machine's memory */
    MOST_MOVES = 1024  /* each leaves three mappings more, at most */
};

typedef enum state {
    USED,
    FREE,
    EMPTY
} state;

typedef struct range range;
struct range {
    char *data;
    size_t bytes;
    state state;
    range *before, *after; /* by address */
    range *next, **link; /* of the list of the state; link: the pointer to this range */
};

static struct {
    pthread_mutex_t busy;
    pthread_once_t once;
    char *data;
    size_t bytes;
    range **used;    /* by the number of the block's first grain */
    range *lists[3]; /* by state; none of USED */
    size_t moves;    /* since mappings were merged */
    ct_arena_size size;
} arena = {.busy = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

/* ---- ranges ---------------------------------------------------------------------- */

static void
enlist(range *r, state kind)
{
    r->state = kind;
    if (kind == USED) {
        r->link = NULL;
        return;
    }
    r->link = &arena.lists[kind];
    r->next = *r->link;
    if (r->next != NULL) {
        r->next->link = &r->next;
    }
    *r->link = r;
}

static void
delist(range *r)
{
    if (r->link != NULL) {
        *r->link = r->next;
        if (r->next != NULL) {
            r->next->link = r->link;
        }
        r->link = NULL;
    }
}

static range *
range_new(char *data, size_t bytes, range *before)
{
    range *r = ct_calloc(1, sizeof *r);
    if (r != NULL) {
        *r = (range){.data = data, .bytes = bytes, .before = before};
        if (before != NULL) {
            r->after = before->after;
            before->after = r;
        }
        if (r->after != NULL) {
            r->after->before = r;
        }
    }
    return r;
}

/* Cuts r after `bytes`; the rest is a range of the same state. */
static bool
cut(range *r, size_t bytes)
{
    if (r->bytes == bytes) {
        return true;
    }
    range *rest = range_new(r->data + bytes, r->bytes - bytes, r);
    if (rest != NULL) {
        r->bytes = bytes;
        enlist(rest, r->state);
    }
    return rest != NULL;
}

/* Appends the range after r to r. */
static void
merge(range *r)
{
    range *gone = r->after;
    r->bytes += gone->bytes;
    r->after = gone->after;
    if (r->after != NULL) {
        r->after->before = r;
    }
    delist(gone);
    ct_free(gone);
}

/* Gives r, taken out of its list, the state FREE or EMPTY. */
static void
settle(range *r, state kind)
{
    if (r->after != NULL && r->after->state == kind) {
        merge(r);
    }
    if (r->before != NULL && r->before->state == kind) {
        merge(r->before);
        return;
    }
    enlist(r, kind);
}

/* The shortest range of the state with at least `bytes`. */
static range *
shortest(state kind, size_t bytes)
{
    range *best = NULL;
    for (range *r = arena.lists[kind]; r != NULL; r = r->next) {
        if (r->bytes >= bytes && (best == NULL || r->bytes < best->bytes)) {
            best = r;
        }
    }
    return best;
}

/* The end, of at most `bytes`, of the longest free range. */
static range *
free_end(size_t bytes)
{
    range *best = arena.lists[FREE];
    for (range *r = best; r != NULL; r = r->next) {
        best = r->bytes > best->bytes ? r : best;
    }
    if (best == NULL || best->bytes <= bytes) {
        return best;
    }
    return cut(best, best->bytes - bytes) ? best->after : NULL;
}

/* ---- pages ----------------------------------------------------------------------- */

/* Maps addresses, these or any, without pages; NULL where the system does not. */
static void *
map(void *data, size_t bytes)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *made = mmap(data, bytes, PROT_READ | PROT_WRITE,
                      flags | (data == NULL ? 0 : MAP_FIXED), -1, 0);
    return made == MAP_FAILED ? NULL : made;
}

bool
ct_arena_move(void *to, void *from, size_t bytes)
{
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    const size_t half = ct_pages_round(bytes / 2);
    if (mremap(from, bytes, bytes, flags, to) == to) {
        return true;
    }
    /* EFAULT: `from` is of several mappings, before Linux 6.17. */
    return errno == EFAULT && half < bytes && ct_arena_move(to, from, half) &&
           ct_arena_move((char *)to + half, (char *)from + half, bytes - half);
}

/* Fills r with the pages of free ranges: from the ends of the longest, to leave few
 * pieces. The rest gets new pages by the first touch. */
static void
fill(const range *r)
{
    for (size_t done = 0; done < r->bytes;) {
        range *from = free_end(r->bytes - done);
        if (from == NULL) {
            return;
        }
        if (!ct_arena_move(r->data + done, from->data, from->bytes)) {
            (void)madvise(from->data, from->bytes, MADV_DONTNEED);
        }
        arena.moves++;
        done += from->bytes;
        arena.size.free -= from->bytes;
        delist(from);
        settle(from, EMPTY);
    }
}

/* A range that the system does not map is not used again. */
static void
merge_mappings(void)
{
    while (arena.lists[FREE] != NULL) {
        range *r = arena.lists[FREE];
        delist(r);
        settle(r, EMPTY);
    }
    for (range *r = arena.lists[EMPTY], *next; r != NULL; r = next) {
        next = r->next;
        if (!map(r->data, r->bytes)) {
            delist(r);
            enlist(r, USED);
        }
    }
    arena.size.free = 0;
    arena.moves = 0;
}

/* ---- opening --------------------------------------------------------------------- */

static void
lock(void)
{
    (void)pthread_mutex_lock(&arena.busy);
}

static void
unlock(void)
{
    (void)pthread_mutex_unlock(&arena.busy);
}

/* Under a limit of addresses the arena would take addresses of others. */
static void
open_arena(void)
{
    struct rlimit limit;
    const size_t memory =
        (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    const size_t bytes = memory * OF_MEMORY / GRAIN * GRAIN;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) {
        return;
    }
    char *data = map(NULL, bytes);
    range **used =
        data == NULL ? NULL : (range **)map(NULL, bytes / GRAIN * sizeof(range *));
    range *all = used == NULL ? NULL : range_new(data, bytes, NULL);
    if (all == NULL) {
        if (data != NULL) {
            (void)munmap(data, bytes);
        }
        return;
    }
    (void)pthread_atfork(lock, unlock, unlock);
    enlist(all, EMPTY);
    arena.used = used;
    arena.bytes = bytes;
    __atomic_store_n(&arena.data, data, __ATOMIC_RELEASE);
}

/* ---- blocks ---------------------------------------------------------------------- */

static range *
take(size_t bytes)
{
    if (arena.moves >= MOST_MOVES) {
        merge_mappings();
    }
    range *r = shortest(FREE, bytes);
    const bool is_free = r != NULL;
    r = is_free ? r : shortest(EMPTY, bytes);
    if (r == NULL || !cut(r, bytes)) {
        return NULL;
    }
    delist(r);
    enlist(r, USED);
    if (is_free) {
        arena.size.free -= bytes;
    }
    else {
        fill(r);
    }
    arena.size.used += bytes;
    arena.used[(size_t)(r->data - arena.data) / GRAIN] = r;
    return r;
}

void *
ct_arena_alloc(size_t bytes)
{
    if (bytes == 0 || bytes > SIZE_MAX - GRAIN) {
        return NULL;
    }
    (void)pthread_once(&arena.once, open_arena);
    if (arena.data == NULL) {
        return NULL;
    }
    lock();
    const range *r = take((bytes + GRAIN - 1) / GRAIN * GRAIN);
    unlock();
    return r == NULL ? NULL : r->data;
}

bool
ct_arena_free(void *block)
{
    const char *first = __atomic_load_n(&arena.data, __ATOMIC_ACQUIRE);
    const size_t at = (size_t)((uintptr_t)block - (uintptr_t)first);
    if (first == NULL || at >= arena.bytes) {
        return false;
    }
    lock();
    range **place = &arena.used[at / GRAIN], *r = *place;
    *place = NULL;
    arena.size.used -= r->bytes;
    arena.size.free += r->bytes;
    settle(r, FREE);
    unlock();
    return true;
}

void
ct_arena_trim(void)
{
    lock();
    while (arena.lists[FREE] != NULL) {
        range *r = arena.lists[FREE];
        (void)madvise(r->data, r->bytes, MADV_DONTNEED);
        delist(r);
        settle(r, EMPTY);
    }
    arena.size.free = 0;
    unlock();
}

ct_arena_size
ct_arena_measure(void)
{
    lock();
    const ct_arena_size size = arena.size;
    unlock();
    return size;
}

/* ---- blocks of a library --------------------------------------------------------- */

/* Alignments beyond a page are asked for to get huge pages, and are no condition. */
static int
serve_alloc(void **block, size_t alignment, size_t bytes)
{
    void *found = bytes < LEAST ? NULL : ct_arena_alloc(bytes);
    if (found == NULL) {
        return posix_memalign(block, alignment, bytes);
    }
    *block = found;
    return 0;
}

static void
serve_free(void *block)
{
    if (!ct_arena_free(block)) {
        free(block);
    }
}

/* free() first: no block may exist before its free() is served. */
bool
ct_arena_serve(const char *library)
{
    (void)pthread_once(&arena.once, open_arena);
    return arena.data != NULL &&
           ct_import_replace(library, "free", (ct_function *)serve_free) &&
           ct_import_replace(library, "posix_memalign", (ct_function *)serve_alloc);
}
