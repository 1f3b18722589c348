/* A file about to be written: its bytes in order, and the checksums inside it that are
 * left blank until somebody has time to work them out.
 *
 * A plan is made where training waits, so making it reads no tensor; it is sealed and
 * written on the writer's thread. One that reads other files, of shards for instance,
 * is streamed instead: a block at a time is all that it holds of them. */
#ifndef CORE_CHECKPOINT_PLAN_H
#define CORE_CHECKPOINT_PLAN_H

#include "core/base/buf.h"
#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of another file. */
typedef struct ct_excerpt {
    const char *path; /* NULL: zeros */
    uint64_t offset;
    size_t n;
} ct_excerpt;

/* Bytes in memory, or excerpts, one after the other, where there are any. */
typedef struct ct_plan_piece {
    const void *data;
    size_t n;
    unsigned char *owned; /* the plan's own memory, then == data; else NULL */
    const ct_excerpt *excerpts;
    size_t n_excerpts;
    bool zipped;     /* a CT_PATCH_CRC32 asks for crc32 */
    uint32_t crc32c; /* of the bytes, once sealed or streamed */
    uint32_t crc32;
} ct_plan_piece;

typedef enum ct_patch_kind {
    CT_PATCH_CRC32C_HEX, /* eight lower-case hexadecimal digits */
    CT_PATCH_CRC32       /* ZIP's checksum, four bytes, little-endian */
} ct_patch_kind;

/* The checksum of pieces [first, first + n) goes to `offset` in piece `to`, one that
 * the plan owns and that is not among them. For CT_PATCH_CRC32 n is 1. */
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
    uint32_t crc32c; /* the whole file, once sealed or streamed */
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

/* Appends excerpts[0..n), borrowed until the plan is streamed. Such a plan can be
 * streamed only. */
CT_NODISCARD ct_status ct_plan_add_excerpts(ct_plan *plan, const ct_excerpt *excerpts,
                                            size_t n, ct_error *err);

/* The pieces that it speaks of have been added. */
CT_NODISCARD ct_status ct_plan_add_patch(ct_plan *plan, ct_patch patch, ct_error *err);

/* Fills in every patch and the checksum of the whole: one pass over the data, a second
 * one where ZIP's checksum is wanted. */
void ct_plan_seal(ct_plan *plan);

/* Seals and writes in one pass: beside path first, then synchronised and renamed, so
 * that path is never half a file. Holds one block of excerpts. CT_EINVAL where an
 * excerpt's file ends too soon. */
CT_NODISCARD ct_status ct_plan_publish(ct_plan *plan, const char *path, ct_error *err);

/* Writes a sealed plan to path, replacing a file that is there. */
CT_NODISCARD ct_status ct_plan_write(const ct_plan *plan, const char *path,
                                     ct_error *err);

/* The files of one save: plans that are written once, and what is on the disk then.
 *
 * Others may write into the same folder, and over files of ours once these have been
 * written: the disk has the last word on what a checkpoint holds. */

typedef struct ct_fileset_file ct_fileset_file;

/* Starts as {0}. */
typedef struct ct_fileset {
    ct_fileset_file *files;
    size_t n, capacity;
} ct_fileset;

void ct_fileset_fini(ct_fileset *set);
void ct_fileset_clear(ct_fileset *set); /* forgets the files, keeps the memory */

/* Takes a named plan over, leaving *plan empty; it replaces one of the same name. */
CT_NODISCARD ct_status ct_fileset_keep(ct_fileset *set, ct_plan *plan, size_t *index,
                                       ct_error *err);

/* Writes one file, or all, into folder, but none a second time. */
CT_NODISCARD ct_status ct_fileset_write_one(ct_fileset *set, size_t index,
                                            const char *folder, ct_error *err);
CT_NODISCARD ct_status ct_fileset_write(ct_fileset *set, const char *folder,
                                        ct_error *err);

/* Puts every file in folder, ours or not, on the disk, and last the manifest of them.
 */
CT_NODISCARD ct_status ct_fileset_sync(ct_fileset *set, const char *folder,
                                       ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
