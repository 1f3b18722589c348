#define _GNU_SOURCE
#include "core/checkpoint/arena.h"

#include "core/base/alloc.h"
#include "core/base/pool.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    ALIGNMENT = 64,
    PAGE_BYTES = 2 << 20,   /* a huge page: fewer faults at the first save */
    CHUNK_BYTES = 64 << 20, /* the least that is mapped at a time */
    PORTION_BYTES = 4 << 20 /* copied at a time by one thread */
};

void
ct_arena_fini(ct_arena *arena)
{
    for (size_t i = 0; i < arena->n_chunks; i++) {
        (void)munmap(arena->chunks[i].data, arena->chunks[i].bytes);
    }
    ct_free(arena->chunks);
    *arena = (ct_arena){0};
}

void
ct_arena_reset(ct_arena *arena)
{
    for (size_t i = 0; i < arena->n_chunks; i++) {
        arena->chunks[i].used = 0;
    }
}

size_t
ct_arena_bytes(const ct_arena *arena)
{
    size_t bytes = 0;
    for (size_t i = 0; i < arena->n_chunks; i++) {
        bytes += arena->chunks[i].bytes;
    }
    return bytes;
}

static void *
take_from(ct_arena_chunk *chunk, size_t bytes)
{
    if (chunk->bytes - chunk->used < bytes) {
        return NULL;
    }
    void *data = chunk->data + chunk->used;
    chunk->used += bytes;
    return data;
}

/* Bytes that can be taken without swapping, as the kernel estimates them; SIZE_MAX
 * where it does not say. */
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

static ct_arena_chunk *
add_chunk(ct_arena *arena, size_t bytes)
{
    void *block = arena->chunks;
    bytes = bytes < CHUNK_BYTES ? CHUNK_BYTES : bytes;
    bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (ct_grow(&block, &arena->chunks_capacity, arena->n_chunks + 1,
                sizeof *arena->chunks, NULL) != CT_OK) {
        return NULL;
    }
    arena->chunks = block;
    if (bytes / 9 > available_bytes() / 10) { /* mmap would promise what is not there */
        return NULL;
    }
    void *data =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    (void)madvise(data, bytes, MADV_HUGEPAGE); /* where not to be had: small pages */
#endif
    arena->chunks[arena->n_chunks] = (ct_arena_chunk){.data = data, .bytes = bytes};
    return &arena->chunks[arena->n_chunks++];
}

void *
ct_arena_take(ct_arena *arena, size_t bytes)
{
    if (bytes > SIZE_MAX - PAGE_BYTES) {
        return NULL;
    }
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    for (size_t i = 0; i < arena->n_chunks; i++) {
        void *data = take_from(&arena->chunks[i], bytes);
        if (data != NULL) {
            return data;
        }
    }
    ct_arena_chunk *chunk = add_chunk(arena, bytes);
    return chunk == NULL ? NULL : take_from(chunk, bytes);
}

/* One batch of the pool: some bytes of one piece, or several small pieces. */
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

static size_t
count_portions(const ct_plan *plan)
{
    size_t n = 0;
    for (size_t i = 0; i < plan->n_pieces; i++) {
        n += plan->pieces[i].n / PORTION_BYTES + 1;
    }
    return n;
}

/* Takes memory for every borrowed piece: targets[i], NULL where there is nothing. */
static ct_status
take_targets(ct_arena *arena, const ct_plan *plan, unsigned char **targets,
             ct_error *err)
{
    for (size_t i = 0; i < plan->n_pieces; i++) {
        const ct_plan_piece *piece = &plan->pieces[i];
        if (piece->owned != NULL || piece->n == 0) {
            continue;
        }
        targets[i] = ct_arena_take(arena, piece->n);
        if (targets[i] == NULL) {
            return ct_fail(err, CT_ENOMEM, "no memory for a snapshot of %s",
                           plan->name);
        }
    }
    return CT_OK;
}

static void
copy_all(ct_plan *plan, unsigned char *const *targets, portion *portions)
{
    size_t n = 0;
    for (size_t i = 0; i < plan->n_pieces; i++) {
        const unsigned char *from = plan->pieces[i].data;
        for (size_t at = 0; targets[i] != NULL && at < plan->pieces[i].n;) {
            size_t left = plan->pieces[i].n - at;
            size_t bytes = left < PORTION_BYTES ? left : PORTION_BYTES;
            portions[n++] = (portion){targets[i] + at, from + at, bytes};
            at += bytes;
        }
    }
    ct_pool_run(copy_portion, portions, n);
    for (size_t i = 0; i < plan->n_pieces; i++) {
        if (targets[i] != NULL) {
            plan->pieces[i].data = targets[i];
        }
    }
}

ct_status
ct_arena_copy(ct_arena *arena, ct_plan *plan, ct_error *err)
{
    ct_status status;
    portion *portions = ct_calloc(count_portions(plan) + 1, sizeof *portions);
    unsigned char **targets =
        (unsigned char **)ct_calloc(plan->n_pieces + 1, sizeof(unsigned char *));
    if (portions != NULL && targets != NULL) {
        status = take_targets(arena, plan, targets, err);
        if (status == CT_OK) {
            copy_all(plan, targets, portions);
        }
    }
    else {
        status = ct_fail(err, CT_ENOMEM, "no memory for a snapshot of %s", plan->name);
    }
    ct_free((void *)targets);
    ct_free(portions);
    return status;
}
