/* A file about to be written: its bytes in order, and the checksums inside it that are
 * left blank until somebody has time to work them out.
 *
 * A plan is made where training waits, so making it reads no tensor; it is sealed and
 * written on the writer's thread. */
#ifndef CT_PLAN_H
#define CT_PLAN_H

#include "core/ct_buf.h"
#include "core/ct_status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_plan_piece {
    const void *data;
    size_t n;
    unsigned char *owned; /* the plan's own memory, then == data; else NULL */
    uint32_t crc32c;      /* of data, once sealed */
} ct_plan_piece;

typedef enum ct_patch_kind {
    CT_PATCH_CRC32C_HEX, /* eight lower-case hexadecimal digits */
    CT_PATCH_CRC32       /* ZIP's checksum, four bytes, little-endian */
} ct_patch_kind;

/* The checksum of pieces [first, first + n) goes to `offset` in piece `to`, one that
 * the plan owns and that is not among them. */
typedef struct ct_patch {
    ct_patch_kind kind;
    size_t first, n;
    size_t to, offset;
} ct_patch;

/* Starts as {0}. */
typedef struct ct_plan {
    char *name; /* path inside the checkpoint's folder; owned */
    ct_plan_piece *pieces;
    size_t n_pieces, pieces_capacity;
    ct_patch *patches;
    size_t n_patches, patches_capacity;
    uint64_t bytes;  /* the whole file */
    uint32_t crc32c; /* the whole file, once sealed */
} ct_plan;

void ct_plan_fini(ct_plan *plan);

/* "name", "sub/name": never absolute, never with ".." (CT_EINVAL). */
CT_NODISCARD ct_status ct_plan_set_name(ct_plan *plan, const char *name, ct_error *err);

/* Appends what buf holds, taking it over and leaving buf empty. */
CT_NODISCARD ct_status ct_plan_add_buf(ct_plan *plan, ct_buf *buf, ct_error *err);

/* Appends n borrowed bytes: they must stay as they are until the plan is written, or
 * be replaced by a copy (ct_arena_copy). */
CT_NODISCARD ct_status ct_plan_add_data(ct_plan *plan, const void *data, size_t n,
                                        ct_error *err);
CT_NODISCARD ct_status ct_plan_add_patch(ct_plan *plan, ct_patch patch, ct_error *err);

/* Fills in every patch and the checksum of the whole: one pass over the data, a second
 * one where ZIP's checksum is wanted. */
void ct_plan_seal(ct_plan *plan);

/* Writes a sealed plan to path, replacing a file that is there. */
CT_NODISCARD ct_status ct_plan_write(const ct_plan *plan, const char *path,
                                     ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
