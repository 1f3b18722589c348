/* Plans of files: pieces of memory and excerpts of other files, written in order.
 *
 * A checksum inside a file covers pieces that come after its place. The place stays
 * blank until all pieces are summed, and the plan's own pieces, the only ones with
 * such places, are summed last. */
#define _POSIX_C_SOURCE 200809L

#include "core/checkpoint/plan.h"

#include "core/base/alloc.h"
#include "core/base/crc.h"
#include "core/base/io.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/source.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void
ct_plan_fini(ct_plan *plan)
{
    for (size_t i = 0; i < plan->n_pieces; i++) {
        ct_free(plan->pieces[i].owned);
    }
    ct_free(plan->pieces);
    ct_free(plan->patches);
    ct_free(plan->name);
    *plan = (ct_plan){0};
}

/* The name becomes a path below the checkpoint's folder, also on another machine. */
ct_status
ct_plan_set_name(ct_plan *plan, const char *name, ct_error *err)
{
    if (!ct_path_is_inside(name, strlen(name))) {
        return ct_fail(err, CT_EINVAL,
                       "a file of a checkpoint needs a name inside its folder, got "
                       "'%.200s'",
                       name);
    }
    char *copy = ct_path_join("", name);
    if (copy == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the name of a file");
    }
    ct_free(plan->name);
    plan->name = copy;
    return CT_OK;
}

static ct_status
add_piece(ct_plan *plan, ct_plan_piece piece, ct_error *err)
{
    void *block = plan->pieces;
    ct_status status = ct_grow(&block, &plan->pieces_capacity, plan->n_pieces + 1,
                               sizeof *plan->pieces, err);
    plan->pieces = block;
    if (status == CT_OK) {
        plan->pieces[plan->n_pieces++] = piece;
        plan->bytes += piece.n;
    }
    return status;
}

ct_status
ct_plan_add_buf(ct_plan *plan, ct_buf *buf, ct_error *err)
{
    ct_plan_piece piece = {.data = buf->data, .n = buf->n, .owned = buf->data};
    ct_status status = add_piece(plan, piece, err);
    /* After a failure the caller still owns the buffer. */
    if (status == CT_OK) {
        *buf = (ct_buf){0};
    }
    return status;
}

ct_status
ct_plan_add_data(ct_plan *plan, const void *data, size_t n, ct_place place,
                 ct_error *err)
{
    return add_piece(plan, (ct_plan_piece){.data = data, .n = n, .place = place}, err);
}

ct_status
ct_plan_add_excerpts(ct_plan *plan, const ct_excerpt *excerpts, size_t n, ct_error *err)
{
    ct_plan_piece piece = {.excerpts = excerpts, .n_excerpts = n};
    for (size_t i = 0; i < n; i++) {
        piece.n += excerpts[i].n;
    }
    return add_piece(plan, piece, err);
}

ct_status
ct_plan_add_patch(ct_plan *plan, ct_patch patch, ct_error *err)
{
    void *block = plan->patches;
    ct_status status = ct_grow(&block, &plan->patches_capacity, plan->n_patches + 1,
                               sizeof *plan->patches, err);
    plan->patches = block;
    if (status == CT_OK) {
        plan->patches[plan->n_patches++] = patch;
        /* ZIP's checksum costs a second pass over the block, so only pieces with such a
         * patch get the sum. */
        if (patch.kind == CT_PATCH_CRC32) {
            plan->pieces[patch.first].zipped = true;
        }
    }
    return status;
}

static void
store_hex(unsigned char *at, uint32_t value)
{
    for (int i = 7; i >= 0; i--, value >>= 4) {
        at[i] = (unsigned char)"0123456789abcdef"[value & 15u];
    }
}

static void
apply_patch(const ct_plan *plan, const ct_patch *patch)
{
    uint32_t crc = 0;
    unsigned char *at = plan->pieces[patch->to].owned + patch->offset;
    for (size_t i = patch->first; i < patch->first + patch->n; i++) {
        const ct_plan_piece *piece = &plan->pieces[i];
        /* A patch of this kind covers one piece; CRC-32C of several pieces combine
         * without another pass over the bytes. */
        crc = patch->kind == CT_PATCH_CRC32
                  ? piece->crc32
                  : ct_crc32c_combine(crc, piece->crc32c, piece->n);
    }
    if (patch->kind == CT_PATCH_CRC32) {
        ct_store_le32(at, crc);
    }
    else {
        store_hex(at, crc);
    }
}

/* Fills in the patches; needs the checksums of all pieces but the plan's own. */
static void
fill_in(ct_plan *plan)
{
    for (size_t i = 0; i < plan->n_patches; i++) {
        apply_patch(plan, &plan->patches[i]);
    }
    plan->crc32c = 0;
    for (size_t i = 0; i < plan->n_pieces; i++) {
        ct_plan_piece *piece = &plan->pieces[i];
        if (piece->owned != NULL) {
            piece->crc32c = ct_crc32c(0, piece->data, piece->n);
        }
        plan->crc32c = ct_crc32c_combine(plan->crc32c, piece->crc32c, piece->n);
    }
}

/* ---- writing ---------------------------------------------------------------------
 *
 * Each block is read, summed and written before the next, so that a file made of
 * other files may be larger than memory. */

enum {
    BLOCK_BYTES = 1 << 20
};

static const char suffix[] = ".ctrainer-saving";

typedef struct stream {
    int fd;
    const char *path; /* named in errors */
    uint64_t at;      /* bytes written */
    unsigned char *block;
    int source; /* open file of the last excerpt, or -1 */
    const char *source_path;
} stream;

/* While the block is in the cache. */
static void
add_to_sums(ct_plan_piece *piece, const void *data, size_t n)
{
    piece->crc32c = ct_crc32c(piece->crc32c, data, n);
    if (piece->zipped) {
        piece->crc32 = ct_crc32(piece->crc32, data, n);
    }
}

static ct_status
put(stream *s, ct_plan_piece *piece, const void *data, size_t n, ct_error *err)
{
    add_to_sums(piece, data, n);
    ct_status status = ct_write_at(s->fd, data, n, s->at, s->path, err);
    s->at += n;
    return status;
}

static void
close_source(stream *s)
{
    if (s->source >= 0) {
        (void)close(s->source);
    }
    s->source = -1;
    s->source_path = NULL;
}

/* The last file stays open: neighbouring tensors are mostly in the same file. */
static ct_status
open_source(stream *s, const char *path, ct_error *err)
{
    uint64_t bytes;
    if (s->source >= 0 && strcmp(s->source_path, path) == 0) {
        return CT_OK;
    }
    close_source(s);
    s->source = ct_open_read(path, &bytes, err);
    s->source_path = path;
    return s->source < 0 ? CT_EIO : CT_OK;
}

static ct_status
put_excerpt(stream *s, ct_plan_piece *piece, const ct_excerpt *excerpt, ct_error *err)
{
    ct_status status = CT_OK;
    if (excerpt->path == NULL) {
        /* Zeros stand for shards without a file; the block may hold another excerpt's
         * bytes. */
        memset(s->block, 0, excerpt->n < BLOCK_BYTES ? excerpt->n : BLOCK_BYTES);
    }
    else {
        status = open_source(s, excerpt->path, err);
    }
    for (size_t done = 0; done < excerpt->n && status == CT_OK;) {
        size_t left = excerpt->n - done, n = left < BLOCK_BYTES ? left : BLOCK_BYTES;
        if (excerpt->path != NULL) {
            status = ct_read_at(s->source, s->block, n, excerpt->offset + done,
                                excerpt->path, err);
        }
        if (status == CT_OK) {
            status = put(s, piece, s->block, n, err);
        }
        done += n;
    }
    return status;
}

/* Of a device, by way of the block. */
static ct_status
put_memory(stream *s, ct_plan_piece *piece, ct_error *err)
{
    const ct_device *device = piece->place.device;
    ct_status status = CT_OK;
    for (size_t done = 0; done < piece->n && status == CT_OK;) {
        size_t left = piece->n - done, n = left < BLOCK_BYTES ? left : BLOCK_BYTES;
        const unsigned char *data = (const unsigned char *)piece->data + done;
        if (device != NULL) {
            status = device->transfer(piece->place.stream, s->block, data, n, err);
            data = s->block;
        }
        if (status == CT_OK) {
            status = put(s, piece, data, n, err);
        }
        done += n;
    }
    return status;
}

/* Switches to the piece's device before it is read, and back when called again. */
static ct_status
switch_device(const ct_plan_piece *piece, int *ordinal, ct_error *err)
{
    return piece->place.device == NULL
               ? CT_OK
               : ct_device_switch(piece->place.device, ordinal, err);
}

static ct_status
put_piece(stream *s, ct_plan_piece *piece, ct_error *err)
{
    ct_status status = CT_OK;
    piece->crc32c = piece->crc32 = 0;
    if (piece->n_excerpts == 0) {
        ct_error unused;
        int ordinal = piece->place.ordinal;
        status = switch_device(piece, &ordinal, err);
        if (status == CT_OK) {
            status = put_memory(s, piece, err);
            (void)switch_device(piece, &ordinal, &unused);
        }
        return status;
    }
    for (size_t i = 0; i < piece->n_excerpts && status == CT_OK; i++) {
        status = put_excerpt(s, piece, &piece->excerpts[i], err);
    }
    return status;
}

/* Writes the plan's own pieces again, with the patches. Own pieces are headers and
 * directories, so few bytes are written twice. */
static ct_status
put_patched(stream *s, const ct_plan *plan, ct_error *err)
{
    uint64_t at = 0;
    ct_status status = CT_OK;
    for (size_t i = 0; i < plan->n_pieces && status == CT_OK; i++) {
        const ct_plan_piece *piece = &plan->pieces[i];
        if (piece->owned != NULL) {
            status = ct_write_at(s->fd, piece->data, piece->n, at, s->path, err);
        }
        at += piece->n;
    }
    return status;
}

static ct_status
put_plan(stream *s, ct_plan *plan, ct_error *err)
{
    ct_status status = CT_OK;
    s->block = ct_alloc(BLOCK_BYTES);
    if (s->block == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to write %s", s->path);
    }
    for (size_t i = 0; i < plan->n_pieces && status == CT_OK; i++) {
        status = put_piece(s, &plan->pieces[i], err);
    }
    if (status == CT_OK) {
        fill_in(plan);
        status = plan->n_patches == 0 ? CT_OK : put_patched(s, plan, err);
    }
    close_source(s);
    ct_free(s->block);
    return status;
}

/* Replaces the content of the file at path. O_TRUNC also serves the temporary file that
 * a crash has left. */
static ct_status
write_to(ct_plan *plan, const char *path, ct_error *err)
{
    stream s = {.path = path, .source = -1};
    s.fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
    if (s.fd < 0) {
        return ct_fail_io(err, errno, "create", path);
    }
    ct_status status = put_plan(&s, plan, err);
    if (close(s.fd) < 0 && status == CT_OK) { /* NFS reports a full disk only here */
        status = ct_fail_io(err, errno, "write", path);
    }
    return status;
}

/* Unlinked rather than truncated: a hard link elsewhere, or a reader that has the file
 * open, keeps the old content. */
ct_status
ct_plan_write(ct_plan *plan, const char *path, ct_error *err)
{
    return unlink(path) < 0 && errno != ENOENT ? ct_fail_io(err, errno, "replace", path)
                                               : write_to(plan, path, err);
}

/* Cuts the name off the caller's path: its last use. */
static ct_status
sync_folder_of(char *path, ct_error *err)
{
    char *name = path + (ct_path_name(path) - path);
    if (name == path) {
        return ct_sync_folder(".", err);
    }
    *name = '\0';
    return ct_sync_folder(path, err);
}

ct_status
ct_plan_publish(ct_plan *plan, const char *path, ct_error *err)
{
    size_t n = strlen(path) + sizeof suffix;
    char *beside = ct_alloc(n);
    if (beside == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to write %s", path);
    }
    (void)snprintf(beside, n, "%s%s", path, suffix);
    ct_status status = write_to(plan, beside, err);
    if (status == CT_OK) {
        /* The data before the name: after a loss of power the new name must not stand
         * for an empty file. */
        status = ct_sync_file(beside, err);
    }
    if (status == CT_OK && rename(beside, path) < 0) {
        status = ct_fail_io(err, errno, "write", path);
    }
    if (status != CT_OK) {
        (void)remove(beside);
    }
    else {
        /* The file is in place already, so a failure here removes nothing. */
        status = sync_folder_of(beside, err);
    }
    ct_free(beside);
    return status;
}
