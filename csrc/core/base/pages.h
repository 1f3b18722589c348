/* Whole pages of memory, of this process alone or a rank's part of what it shares.
 *
 * They never move. Their content may be discarded, which gives the memory back to the
 * system while the addresses stay: the next touch finds zeroes. Several may hold them:
 * who asked for them, and the group through which others read them. */
#ifndef CORE_BASE_PAGES_H
#define CORE_BASE_PAGES_H

#include "core/base/owner.h"
#include "core/base/segment.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_pages {
    unsigned char *data; /* zeroed when made; aligned to a page */
    size_t bytes;        /* a multiple of a page, at least what was asked for */
    bool is_shared;      /* other processes read it */
    ct_segment segment;  /* where it lies; all zeros unless shared */
    int holders;
    ct_owner owner;
} ct_pages;

/* bytes rounded up to whole pages; 0 when that overflows. */
size_t ct_pages_round(size_t bytes);

/* Pages of this process alone, with one holder. bytes > 0. CT_EINVAL or CT_ENOMEM. */
CT_NODISCARD ct_status ct_pages_new(ct_pages **pages, size_t bytes, ct_error *err);

/* `bytes` of the segment from `offset` on, both multiples of a page, with one holder;
 * takes the segment over, on failure (CT_ENOMEM) too. */
CT_NODISCARD ct_status ct_pages_new_steal(ct_pages **pages, ct_segment *segment,
                                          size_t offset, size_t bytes, ct_error *err);

/* Gives the memory of [offset, offset + bytes) back; it then reads as zeroes. Both are
 * multiples of a page within the pages, or CT_EINVAL; CT_EIO when the system fails,
 * CT_ECOMM for shared memory in a forked child. */
CT_NODISCARD ct_status ct_pages_discard(ct_pages *pages, size_t offset, size_t bytes,
                                        ct_error *err);

/* Where that rank's part of what is shared begins, as long as this one; NULL for pages
 * that are not shared, or no rank of theirs. */
unsigned char *ct_pages_of_rank(const ct_pages *pages, long rank);

void ct_pages_hold(ct_pages *pages);
void ct_pages_drop(ct_pages *pages); /* the last one unmaps them; NULL is fine */

/* What who asked for them does: discards the content, as other holders may keep the
 * addresses for long, and drops them. A forked child leaves shared content alone. NULL
 * is fine. */
void ct_pages_free(ct_pages *pages);

/* The memory in which the ranks of one machine read each other's data.
 *
 * A peer buffer is a rank's part of a segment in which every rank has one as long, in
 * rank order. All ranks add the same segments in the same order, so that an index and
 * an offset mean the same to all. */

typedef struct ct_peer_buffers {
    ct_pages **own; /* this rank's buffer of each segment */
    size_t n, room;
} ct_peer_buffers;

typedef struct ct_peer_place {
    int buffer; /* index, or -1: in none */
    size_t offset;
} ct_peer_place;

/* Makes room for one more (CT_ENOMEM), then holds it. */
CT_NODISCARD ct_status ct_peer_buffers_reserve(ct_peer_buffers *buffers, ct_error *err);
void ct_peer_buffers_add(ct_peer_buffers *buffers, ct_pages *own);

/* Where `bytes` at `data` lie whole in this rank's buffers; NULL lies in none. */
ct_peer_place
ct_peer_buffers_find(const ct_peer_buffers *buffers, const void *data, size_t bytes);

/* What lies there in that rank's buffer; NULL for what lies in none. */
char *ct_peer_buffers_at(const ct_peer_buffers *buffers, int rank, ct_peer_place place);

void ct_peer_buffers_fini(ct_peer_buffers *buffers); /* all zeros is fine */

#ifdef __cplusplus
}
#endif

#endif
