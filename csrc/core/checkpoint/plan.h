/* The content of a file: its bytes in order, and checksums that are computed later.
 *
 * A plan is made while training waits, so no tensor is read for it; the writer's
 * thread writes the plan, and excerpts of other files, such as shards, pass through a
 * single block of memory. */
#ifndef CORE_CHECKPOINT_PLAN_H
#define CORE_CHECKPOINT_PLAN_H

#include "core/base/buf.h"
#include "core/base/status.h"
#include "core/device/device.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

/* Bytes of another file. */
typedef struct ct_excerpt {
    const char *path; /* NULL: zeros */
    uint64_t offset;
    size_t n;
} ct_excerpt;

/* Bytes in memory, or excerpts in order. */
typedef struct ct_plan_piece {
    const void *data;
    size_t n;
    ct_place place;       /* of data that is borrowed */
    unsigned char *owned; /* the plan's own memory, then == data; else NULL */
    const ct_excerpt *excerpts;
    size_t n_excerpts;
    bool zipped;     /* a CT_PATCH_CRC32 asks for crc32 */
    uint32_t crc32c; /* of the bytes, once written */
    uint32_t crc32;
} ct_plan_piece;

typedef enum ct_patch_kind {
    CT_PATCH_CRC32C_HEX, /* eight lower-case hexadecimal digits */
    CT_PATCH_CRC32       /* ZIP's checksum, four bytes, little-endian */
} ct_patch_kind;

/* Puts the checksum of pieces [first, first + n) at `offset` in piece `to`, which
 * the plan owns and which is not among the summed pieces. n is 1 for CT_PATCH_CRC32. */
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
    uint32_t crc32c; /* the whole file, once written */
} ct_plan;

void ct_plan_fini(ct_plan *plan);

/* "name", "sub/name": never absolute, never with ".." (CT_EINVAL). */
CT_NODISCARD ct_status ct_plan_set_name(ct_plan *plan, const char *name, ct_error *err);

/* Appends the bytes of buf, takes them over and leaves buf empty. */
CT_NODISCARD ct_status ct_plan_add_buf(ct_plan *plan, ct_buf *buf, ct_error *err);

/* Appends n borrowed bytes, which must not change before the plan is written or the
 * snapshot replaces them. */
CT_NODISCARD ct_status ct_plan_add_data(ct_plan *plan, const void *data, size_t n,
                                        ct_place place, ct_error *err);

/* Appends excerpts[0..n), borrowed until the plan is written. */
CT_NODISCARD ct_status ct_plan_add_excerpts(ct_plan *plan, const ct_excerpt *excerpts,
                                            size_t n, ct_error *err);

/* All pieces of the patch have been added before. */
CT_NODISCARD ct_status ct_plan_add_patch(ct_plan *plan, ct_patch patch, ct_error *err);

/* Fills in all patches and the checksum of the file, and writes the plan to path in
 * place of a file that is there. CT_EINVAL where an excerpt's file ends too soon. */
CT_NODISCARD ct_status ct_plan_write(ct_plan *plan, const char *path, ct_error *err);

/* The same, to a temporary file beside path that is synced and renamed, so that path is
 * never half a file. */
CT_NODISCARD ct_status ct_plan_publish(ct_plan *plan, const char *path, ct_error *err);

CT_END_DECLS

#endif
