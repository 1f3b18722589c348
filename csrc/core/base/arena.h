/* Recycled pages: long blocks of this process that share a set of pages.
 *
 * A freed block keeps its pages for the next block. That block lies in a free range of
 * addresses with pages, or else the pages of free ranges move to the block. New pages
 * come from the system only when all pages are in use. So the arena has as many pages
 * as were in use at once, however lengths differ, and after the first steps of a
 * training the system finds and zeroes none.
 *
 * A process has a single arena. All functions may be called by any thread; a forked
 * child has a copy. */
#ifndef CORE_BASE_ARENA_H
#define CORE_BASE_ARENA_H

#include "core/base/decls.h"

#include <stdbool.h>
#include <stddef.h>

CT_BEGIN_DECLS

/* A block of undefined content at a page's boundary. NULL: bytes is 0, no memory or
 * addresses are left, or the process's addresses are limited (RLIMIT_AS). */
void *ct_arena_alloc(size_t bytes);

/* Returns false for memory that is not the arena's, NULL included. */
bool ct_arena_free(void *block);

/* Moves the pages of `bytes` to other addresses, in place of the pages there; `from`
 * stays mapped and then has none. The content may get lost. False, as on Linux before
 * 5.7: not all have moved. */
bool ct_arena_move(void *to, void *from, size_t bytes);

/* Returns the pages of free ranges to the system. */
void ct_arena_trim(void);

/* Bytes in use, and of free ranges with pages. */
typedef struct ct_arena_size {
    size_t used, free;
} ct_arena_size;

ct_arena_size ct_arena_measure(void);

/* Serves the posix_memalign() and free() of a loaded shared library of that file name:
 * blocks from 128 KiB on are the arena's from now on. Calls of other libraries stay as
 * before. Returns false without an arena, or if the library is not loaded or does not
 * call both. */
bool ct_arena_serve(const char *library);

CT_END_DECLS

#endif
