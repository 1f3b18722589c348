/* Whole pages of memory: private to the process, or a rank's part of a shared segment.
 *
 * Pages never move. Discarding the content returns the memory to the system while the
 * addresses stay: the next touch reads zeros. Pages have several holders: the requester
 * and the group of ranks that reads them. */
#ifndef CORE_BASE_PAGES_H
#define CORE_BASE_PAGES_H

#include "core/base/owner.h"
#include "core/base/segment.h"

CT_BEGIN_DECLS

typedef struct ct_pages {
    unsigned char *data; /* zeroed when made; aligned to a page */
    size_t bytes;        /* a multiple of a page */
    bool is_shared;      /* other processes read it */
    ct_segment segment;  /* all zeros unless shared */
    int holders;
    ct_owner owner;
} ct_pages;

/* bytes rounded up to whole pages; 0 when that overflows. */
size_t ct_pages_round(size_t bytes);

/* Asks for huge pages in the untouched memory [data, data + bytes): fewer addresses to
 * translate when the memory is read in order. Does nothing below 2 MiB or where the
 * system has none. */
void ct_pages_prefer_huge(void *data, size_t bytes);

/* Makes private pages with one holder. bytes > 0. CT_EINVAL or CT_ENOMEM. */
CT_NODISCARD ct_status ct_pages_new(ct_pages **pages, size_t bytes, ct_error *err);

/* Makes shared pages with one holder: `bytes` of the segment from `offset` on, both
 * multiples of a page. Takes the segment over, on failure (CT_ENOMEM) too. */
CT_NODISCARD ct_status ct_pages_new_steal(ct_pages **pages, ct_segment *segment,
                                          size_t offset, size_t bytes, ct_error *err);

/* Returns the memory of [offset, offset + bytes) to the system; it then reads as zeros.
 * CT_EINVAL unless offset and bytes are multiples of a page within the pages; CT_EIO
 * when the system fails, CT_ECOMM for shared memory in a forked child. */
CT_NODISCARD ct_status ct_pages_discard(ct_pages *pages, size_t offset, size_t bytes,
                                        ct_error *err);

/* Another rank's part of the segment, as long as this one; NULL for private pages and
 * for a rank outside the group. */
unsigned char *ct_pages_of_rank(const ct_pages *pages, long rank);

void ct_pages_hold(ct_pages *pages);
void ct_pages_drop(ct_pages *pages); /* the last drop unmaps; NULL is fine */

/* The requester's drop: discards the content first, as other holders may keep the
 * addresses for long. A forked child leaves shared content alone. NULL is fine. */
void ct_pages_free(ct_pages *pages);

/* Peer buffers: the memory in which the ranks of one machine read each other's data.
 *
 * A segment has one peer buffer for each rank, all of one length, in rank order. All
 * ranks add the same segments in the same order, so that an index and an offset mean
 * the same place to all. */

typedef struct ct_peer_buffers {
    ct_pages **own; /* this rank's buffer of each segment */
    size_t n, room;
} ct_peer_buffers;

typedef struct ct_peer_place {
    int buffer; /* index, or -1: in none */
    size_t offset;
} ct_peer_place;

/* Makes room for one more buffer. CT_ENOMEM. */
CT_NODISCARD ct_status ct_peer_buffers_reserve(ct_peer_buffers *buffers, ct_error *err);

/* Appends a buffer, holding its pages; the room must be reserved. */
void ct_peer_buffers_add(ct_peer_buffers *buffers, ct_pages *own);

/* Finds the buffer of this rank with all of data[0..bytes); NULL lies in none. */
ct_peer_place
ct_peer_buffers_find(const ct_peer_buffers *buffers, const void *data, size_t bytes);

/* The address of a place in another rank's buffer; NULL for a place in none. */
char *ct_peer_buffers_at(const ct_peer_buffers *buffers, int rank, ct_peer_place place);

void ct_peer_buffers_fini(ct_peer_buffers *buffers); /* all zeros is fine */

CT_END_DECLS

#endif
