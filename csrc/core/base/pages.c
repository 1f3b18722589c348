/* Private pages are an anonymous mapping, shared ones a part of a segment, kept mapped
 * until the last holder drops them.
 *
 * Pages are counted by holders, since a tensor over the memory and the group that reads
 * the memory end in any order. The last holder unmaps; a segment is left then. */
#define _GNU_SOURCE /* MADV_HUGEPAGE, MADV_REMOVE */

#include "core/base/pages.h"

#include "core/base/alloc.h"
#include "core/base/io.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t
page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

size_t
ct_pages_round(size_t bytes)
{
    const size_t page = page_bytes();
    return bytes > SIZE_MAX - page ? 0 : (bytes + page - 1) / page * page;
}

/* Huge pages wholly inside the memory: the neighbours' memory stays as it is. */
void
ct_pages_prefer_huge(void *data, size_t bytes)
{
    const uintptr_t huge = 2 << 20, begin = (uintptr_t)data;
    const size_t before = -begin % huge;
    if (bytes >= before + huge) {
        (void)madvise((char *)data + before, (bytes - before) / huge * huge,
                      MADV_HUGEPAGE);
    }
}

static void
release(ct_pages *p)
{
    if (p->is_shared) {
        ct_segment_leave(&p->segment);
    }
    else if (p->data != NULL) {
        (void)munmap(p->data, p->bytes);
    }
    ct_free(p);
}

static ct_pages *
pages_with_holder(void)
{
    ct_pages *p = ct_calloc(1, sizeof *p);
    if (p != NULL) {
        p->holders = 1;
        p->owner = ct_owner_here();
    }
    return p;
}

ct_status
ct_pages_new(ct_pages **pages, size_t bytes, ct_error *err)
{
    const size_t whole = ct_pages_round(bytes);
    if (whole == 0) {
        return ct_fail(err, CT_EINVAL, "memory must be of more than 0 bytes, got %zu",
                       bytes);
    }
    ct_pages *p = pages_with_holder();
    void *data = p == NULL ? MAP_FAILED
                           : mmap(NULL, whole, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        ct_free(p);
        return ct_fail(err, CT_ENOMEM, "no memory for %zu bytes", whole);
    }
    p->data = data;
    p->bytes = whole;
    *pages = p;
    return CT_OK;
}

ct_status
ct_pages_new_steal(ct_pages **pages, ct_segment *segment, size_t offset, size_t bytes,
                   ct_error *err)
{
    ct_pages *p = pages_with_holder();
    if (p == NULL) {
        ct_segment_leave(segment);
        return ct_fail(err, CT_ENOMEM, "no memory to share %zu bytes", bytes);
    }
    p->data = (unsigned char *)segment->base + offset;
    p->bytes = bytes;
    p->is_shared = true;
    p->segment = *segment;
    *segment = (ct_segment){.fd = -1};
    *pages = p;
    return CT_OK;
}

/* Shared pages belong to the segment's file: only a hole in the file frees them.
 * MADV_DONTNEED would drop this process's view alone, and the next touch would bring
 * the old content again. */
static bool
return_memory(const ct_pages *p, size_t offset, size_t bytes)
{
    const int advice = p->is_shared ? MADV_REMOVE : MADV_DONTNEED;
    return bytes == 0 || madvise(p->data + offset, bytes, advice) == 0;
}

ct_status
ct_pages_discard(ct_pages *p, size_t offset, size_t bytes, ct_error *err)
{
    const size_t page = page_bytes();
    if (offset > p->bytes || bytes > p->bytes - offset || offset % page != 0 ||
        bytes % page != 0) {
        return ct_fail(err, CT_EINVAL,
                       "what is discarded must be whole pages of %zu bytes within %zu "
                       "bytes, got %zu bytes at %zu",
                       page, p->bytes, bytes, offset);
    }
    /* A forked child maps the same file: a hole would erase the parent's data. */
    if (p->is_shared) {
        const ct_status status =
            ct_owner_check(p->owner, "discard", "this memory of a group", err);
        if (status != CT_OK) {
            return status;
        }
    }
    return return_memory(p, offset, bytes)
               ? CT_OK
               : ct_fail_io(err, errno, "discard", "memory of a group");
}

/* All parts of a segment have one length, so the number of ranks follows from the
 * lengths. */
unsigned char *
ct_pages_of_rank(const ct_pages *p, long rank)
{
    const size_t ranks = p->is_shared ? p->segment.bytes / p->bytes : 0;
    return rank >= 0 && (size_t)rank < ranks
               ? (unsigned char *)p->segment.base + (size_t)rank * p->bytes
               : NULL;
}

/* Relaxed: the caller is a holder already, so the count cannot reach 0 meanwhile. */
void
ct_pages_hold(ct_pages *p)
{
    (void)__atomic_add_fetch(&p->holders, 1, __ATOMIC_RELAXED);
}

/* Release and acquire order every holder's last access before the unmapping. */
void
ct_pages_drop(ct_pages *p)
{
    if (p != NULL && __atomic_sub_fetch(&p->holders, 1, __ATOMIC_ACQ_REL) == 0) {
        release(p);
    }
}

void
ct_pages_free(ct_pages *p)
{
    if (p == NULL) {
        return;
    }
    if (!p->is_shared || ct_owner_is_here(p->owner)) {
        (void)return_memory(p, 0, p->bytes); /* otherwise the last holder frees it */
    }
    ct_pages_drop(p);
}

/* Apart from the adding: a collective makes the memory in between, after which no rank
 * may fail alone. */
ct_status
ct_peer_buffers_reserve(ct_peer_buffers *buffers, ct_error *err)
{
    void *own = (void *)buffers->own;
    const ct_status status =
        ct_grow(&own, &buffers->room, buffers->n + 1, sizeof(ct_pages *), err);
    buffers->own = (ct_pages **)own;
    return status;
}

void
ct_peer_buffers_add(ct_peer_buffers *buffers, ct_pages *own)
{
    ct_pages_hold(own);
    buffers->own[buffers->n++] = own;
}

ct_peer_place
ct_peer_buffers_find(const ct_peer_buffers *buffers, const void *data, size_t bytes)
{
    for (size_t i = 0; i < buffers->n && data != NULL; i++) {
        const ct_pages *buffer = buffers->own[i];
        /* An address below the buffer wraps around to an offset beyond the buffer's
         * length. */
        const size_t offset = (uintptr_t)data - (uintptr_t)buffer->data;
        if (offset < buffer->bytes && bytes <= buffer->bytes - offset) {
            return (ct_peer_place){(int)i, offset};
        }
    }
    return (ct_peer_place){-1, 0};
}

char *
ct_peer_buffers_at(const ct_peer_buffers *buffers, int rank, ct_peer_place place)
{
    if (place.buffer < 0) {
        return NULL;
    }
    const ct_pages *buffer = buffers->own[place.buffer];
    return (char *)buffer->segment.base + (size_t)rank * buffer->bytes + place.offset;
}

void
ct_peer_buffers_fini(ct_peer_buffers *buffers)
{
    for (size_t i = 0; i < buffers->n; i++) {
        ct_pages_drop(buffers->own[i]);
    }
    ct_free((void *)buffers->own);
    *buffers = (ct_peer_buffers){0};
}
