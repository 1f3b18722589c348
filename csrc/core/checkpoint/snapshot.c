/* Memory for snapshots, and the copies into it. */
#define _GNU_SOURCE
#include "core/checkpoint/snapshot.h"

#include "core/base/alloc.h"
#include "core/base/io.h"
#include "core/base/pool.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    ALIGNMENT = 64,
    PAGE_BYTES = 2 << 20,    /* a huge page: fewer faults at the first save */
    CHUNK_BYTES = 64 << 20,  /* the least that is mapped at a time */
    PORTION_BYTES = 4 << 20, /* copied by a thread at a time */
    SMALL_PAGE = 4096
};

static void *
take_from(ct_snapshot_chunk *chunk, size_t bytes)
{
    if (chunk->bytes - chunk->used < bytes) {
        return NULL;
    }
    void *data = chunk->data + chunk->used;
    chunk->used += bytes;
    return data;
}

/* The kernel's estimate of memory that is free without swapping; SIZE_MAX without an
 * estimate. */
static size_t
available_bytes(void)
{
    unsigned long long kib = 0;
    char line[128];
    bool found = false;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        static const char key[] = "MemAvailable:";
        found = strncmp(line, key, sizeof key - 1) == 0;
        kib = found ? strtoull(line + sizeof key - 1, NULL, 10) : 0;
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return found && kib < SIZE_MAX / 1024 ? (size_t)kib * 1024 : SIZE_MAX;
}

/* `device` != NULL: pinned memory. */
static ct_snapshot_chunk *
add_chunk(ct_snapshot *s, const ct_device *device, size_t bytes)
{
    void *block = s->chunks;
    bytes = bytes < CHUNK_BYTES ? CHUNK_BYTES : bytes;
    bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (ct_grow(&block, &s->chunks_capacity, s->n_chunks + 1, sizeof *s->chunks,
                NULL) != CT_OK) {
        return NULL;
    }
    s->chunks = block;
    /* mmap() overcommits: a snapshot that swaps, or that the kernel answers by killing
     * a process, is worse than a save without a snapshot. */
    if (bytes / 9 > available_bytes() / 10) {
        return NULL;
    }
    void *data =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    (void)madvise(data, bytes, MADV_HUGEPAGE); /* else small pages */
#endif
    /* Pinning brings the pages, and keeps other threads from the driver meanwhile. */
    for (size_t at = 0; device != NULL && at < bytes; at += SMALL_PAGE) {
        ((volatile unsigned char *)data)[at] = 0;
    }
    if (device != NULL && device->pin(data, bytes, NULL) != CT_OK) {
        (void)munmap(data, bytes);
        return NULL;
    }
    s->chunks[s->n_chunks] =
        (ct_snapshot_chunk){.data = data, .bytes = bytes, .device = device};
    return &s->chunks[s->n_chunks++];
}

static void *
take(ct_snapshot *s, const ct_device *device, size_t bytes)
{
    if (bytes > SIZE_MAX - PAGE_BYTES) {
        return NULL;
    }
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    for (size_t i = 0; i < s->n_chunks; i++) {
        ct_snapshot_chunk *chunk = &s->chunks[i];
        void *data = chunk->device == device ? take_from(chunk, bytes) : NULL;
        if (data != NULL) {
            return data;
        }
    }
    ct_snapshot_chunk *chunk = add_chunk(s, device, bytes);
    return chunk == NULL ? NULL : take_from(chunk, bytes);
}

void
ct_snapshot_reserve(ct_snapshot *s, const ct_device *device, size_t bytes)
{
    volatile unsigned char *data = take(s, device, bytes);
    for (size_t at = 0; data != NULL && at < bytes; at += SMALL_PAGE) {
        data[at] = 0;
    }
    ct_snapshot_clear(s);
}

/* The shared data of a piece, or NULL. */
static const ct_snapshot_shared *
find_shared(const ct_snapshot *s, const ct_plan_piece *piece)
{
    const uintptr_t at = (uintptr_t)piece->data;
    for (size_t i = 0;
         piece->owned == NULL && piece->place.device == NULL && i < s->n_shared; i++) {
        const ct_snapshot_shared *shared = &s->shared[i];
        const uintptr_t begin = (uintptr_t)shared->theirs;
        if (at >= begin && at - begin < shared->n &&
            piece->n <= shared->n - (at - begin)) {
            return shared;
        }
    }
    return NULL;
}

/* A batch of the pool: a part of a piece. */
typedef struct portion {
    unsigned char *to;
    const unsigned char *from;
    size_t n;
} portion;

static void
copy_portion(void *arg, size_t batch)
{
    const portion *p = (const portion *)arg + batch;
    memcpy(p->to, p->from, p->n);
}

/* Takes memory for every borrowed piece that is not shared; targets[i] is NULL for
 * other pieces. */
static ct_status
take_targets(ct_snapshot *s, const ct_plan *plan, unsigned char **targets,
             ct_error *err)
{
    for (size_t i = 0; i < plan->n_pieces; i++) {
        const ct_plan_piece *piece = &plan->pieces[i];
        if (piece->owned != NULL || piece->n == 0 || find_shared(s, piece) != NULL) {
            continue;
        }
        targets[i] = take(s, piece->place.device, piece->n);
        if (targets[i] == NULL) {
            return ct_fail(err, CT_ENOMEM, "no memory for a snapshot of %s",
                           plan->name);
        }
    }
    return CT_OK;
}

/* ---- copies from devices --------------------------------------------------------- */

ct_status
ct_snapshot_await(ct_snapshot *s, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; i < s->n_fetches; i++) {
        ct_error own, unused;
        const ct_device *device = s->fetches[i].place.device;
        int ordinal = s->fetches[i].place.ordinal;
        ct_status ended = ct_device_switch(device, &ordinal, &own);
        if (ended == CT_OK) {
            ended = device->fetch_end(s->fetches[i].copied, &own);
            (void)ct_device_switch(device, &ordinal, &unused);
        }
        if (status == CT_OK && ended != CT_OK) {
            status = ended;
            *err = own;
        }
    }
    s->n_fetches = 0;
    return status;
}

static bool
is_same_place(const ct_place *a, const ct_place *b)
{
    return a->device == b->device && a->ordinal == b->ordinal && a->stream == b->stream;
}

static ct_status
begin_fetch(ct_snapshot *s, const ct_place *place, const ct_host_copy *copies, size_t n,
            ct_error *err)
{
    ct_error unused;
    void *block = s->fetches, *copied = NULL;
    int ordinal = place->ordinal;
    ct_status status = ct_grow(&block, &s->fetches_capacity, s->n_fetches + 1,
                               sizeof *s->fetches, err);
    s->fetches = block;
    if (status == CT_OK) {
        status = ct_device_switch(place->device, &ordinal, err);
    }
    if (status == CT_OK) {
        status = place->device->fetch_begin(place->stream, copies, n, &copied, err);
        (void)ct_device_switch(place->device, &ordinal, &unused);
    }
    if (status == CT_OK) {
        s->fetches[s->n_fetches++] = (ct_snapshot_fetch){*place, copied};
    }
    return status;
}

/* Of the pieces on devices, run by run of the same place, to targets[]. */
static ct_status
fetch_pieces(ct_snapshot *s, const ct_plan *plan, unsigned char **targets,
             ct_host_copy *copies, ct_error *err)
{
    const ct_place *place = NULL;
    size_t n = 0;
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < plan->n_pieces; i++) {
        const ct_plan_piece *piece = &plan->pieces[i];
        if (targets[i] == NULL || piece->place.device == NULL) {
            continue;
        }
        if (n != 0 && !is_same_place(place, &piece->place)) {
            status = begin_fetch(s, place, copies, n, err);
            n = 0;
        }
        place = &piece->place;
        copies[n++] = (ct_host_copy){targets[i], piece->data, piece->n};
    }
    return status == CT_OK && n != 0 ? begin_fetch(s, place, copies, n, err) : status;
}

ct_status
ct_snapshot_copy(ct_snapshot *s, ct_plan *plan, ct_error *err)
{
    size_t most = 1, n = 0;
    for (size_t i = 0; i < plan->n_pieces; i++) {
        most += plan->pieces[i].n / PORTION_BYTES + 1;
    }
    portion *portions = ct_calloc(most, sizeof *portions);
    ct_host_copy *copies = ct_calloc(plan->n_pieces + 1, sizeof *copies);
    unsigned char **targets =
        (unsigned char **)ct_calloc(plan->n_pieces + 1, sizeof(unsigned char *));
    if (portions == NULL || copies == NULL || targets == NULL) {
        ct_free((void *)targets);
        ct_free(copies);
        ct_free(portions);
        return ct_fail(err, CT_ENOMEM, "no memory for a snapshot of %s", plan->name);
    }
    /* All memory is taken before the first piece is changed. */
    ct_status status = take_targets(s, plan, targets, err);
    if (status == CT_OK) {
        status = fetch_pieces(s, plan, targets, copies, err);
    }
    for (size_t i = 0; status == CT_OK && i < plan->n_pieces; i++) {
        ct_plan_piece *piece = &plan->pieces[i];
        const unsigned char *from = piece->data;
        if (targets[i] == NULL) {
            const ct_snapshot_shared *shared = find_shared(s, piece);
            if (shared != NULL) {
                piece->data = shared->data + (from - shared->theirs);
            }
            continue;
        }
        for (size_t at = 0; piece->place.device == NULL && at < piece->n;
             at += PORTION_BYTES) {
            size_t left = piece->n - at;
            portions[n++] = (portion){targets[i] + at, from + at,
                                      left < PORTION_BYTES ? left : PORTION_BYTES};
        }
        piece->data = targets[i];
        piece->place = (ct_place){0};
    }
    if (status == CT_OK) {
        ct_pool_run(copy_portion, portions, n);
    }
    ct_free((void *)targets);
    ct_free(copies);
    ct_free(portions);
    return status;
}

/* ---- the whole ------------------------------------------------------------------- */

ct_status
ct_snapshot_share(ct_snapshot *s, int fd, const void *theirs, size_t n, ct_error *err)
{
    void *block = s->shared;
    ct_status status =
        ct_grow(&block, &s->shared_capacity, s->n_shared + 1, sizeof *s->shared, err);
    s->shared = block;
    if (status != CT_OK) {
        return status;
    }
    void *data = mmap(NULL, n, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
        return ct_fail_io(err, errno, "map", "shared data");
    }
    s->shared[s->n_shared++] = (ct_snapshot_shared){data, theirs, n};
    return CT_OK;
}

void
ct_snapshot_clear(ct_snapshot *s)
{
    ct_error unused;
    (void)!ct_snapshot_await(s, &unused);
    for (size_t i = 0; i < s->n_shared; i++) {
        (void)munmap(s->shared[i].data, s->shared[i].n);
    }
    s->n_shared = 0;
    for (size_t i = 0; i < s->n_chunks; i++) {
        s->chunks[i].used = 0;
    }
}

void
ct_snapshot_leave_devices(ct_snapshot *s)
{
    s->n_fetches = 0;
    for (size_t i = 0; i < s->n_chunks; i++) {
        s->chunks[i].device = NULL;
    }
}

void
ct_snapshot_fini(ct_snapshot *s)
{
    ct_snapshot_clear(s);
    for (size_t i = 0; i < s->n_chunks; i++) {
        if (s->chunks[i].device != NULL) {
            s->chunks[i].device->unpin(s->chunks[i].data);
        }
        (void)munmap(s->chunks[i].data, s->chunks[i].bytes);
    }
    ct_free(s->chunks);
    ct_free(s->fetches);
    ct_free(s->shared);
    *s = (ct_snapshot){0};
}

size_t
ct_snapshot_bytes(const ct_snapshot *s)
{
    size_t bytes = 0;
    for (size_t i = 0; i < s->n_chunks; i++) {
        bytes += s->chunks[i].bytes;
    }
    return bytes;
}
