/* Memory for snapshots: taken piece by piece, given back all at once, kept.
 *
 * A snapshot is hundreds of megabytes; fresh pages cost as much to fault in as the
 * copy itself, so the arena keeps its chunks between saves. The same sequence of
 * requests finds the same chunks again. */
#ifndef CT_ARENA_H
#define CT_ARENA_H

#include "core/checkpoint/plan.h"
#include "core/base/status.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_arena_chunk {
    unsigned char *data; /* mapped */
    size_t bytes;
    size_t used;
} ct_arena_chunk;

/* Starts as {0}. */
typedef struct ct_arena {
    ct_arena_chunk *chunks;
    size_t n_chunks, chunks_capacity;
} ct_arena;

/* Gives the memory back to the system. */
void ct_arena_fini(ct_arena *arena);

/* Makes all of it free to be taken again. */
void ct_arena_reset(ct_arena *arena);

size_t ct_arena_bytes(const ct_arena *arena); /* mapped in all */

/* bytes > 0, aligned to 64; NULL when the system has not that much memory to spare. */
void *ct_arena_take(ct_arena *arena, size_t bytes);

/* Replaces the plan's borrowed bytes by copies in the arena, made by the pool's
 * threads. CT_ENOMEM leaves the plan as it was. */
CT_NODISCARD ct_status ct_arena_copy(ct_arena *arena, ct_plan *plan, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
