/* A plan to a file in one pass: each block is read, summed and written before the next,
 * so that files larger than memory can be put together from others. */
#define _POSIX_C_SOURCE 200809L
#include "core/checkpoint/plan.h"

#include "core/base/alloc.h"
#include "core/base/crc32.h"
#include "core/base/crc32c.h"
#include "core/base/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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

/* The last file stays open: a tensor's neighbour mostly lies in the same one. */
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

static ct_status
put_memory(stream *s, ct_plan_piece *piece, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t done = 0; done < piece->n && status == CT_OK;) {
        size_t left = piece->n - done, n = left < BLOCK_BYTES ? left : BLOCK_BYTES;
        status = put(s, piece, (const unsigned char *)piece->data + done, n, err);
        done += n;
    }
    return status;
}

static ct_status
put_piece(stream *s, ct_plan_piece *piece, ct_error *err)
{
    ct_status status = CT_OK;
    piece->crc32c = piece->crc32 = 0;
    if (piece->n_excerpts == 0) {
        return put_memory(s, piece, err);
    }
    for (size_t i = 0; i < piece->n_excerpts && status == CT_OK; i++) {
        status = put_excerpt(s, piece, &piece->excerpts[i], err);
    }
    return status;
}

/* Patches have changed what the plan owns: those pieces are written once more. */
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
        ct_plan_fill_in(plan);
        status = put_patched(s, plan, err);
    }
    close_source(s);
    ct_free(s->block);
    return status;
}

/* Writes the plan to path, which is replaced, and puts it on the disk. */
static ct_status
stream_to(ct_plan *plan, const char *path, ct_error *err)
{
    stream s = {.path = path, .source = -1};
    s.fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0666);
    if (s.fd < 0) {
        return ct_fail_io(err, errno, "create", path);
    }
    ct_status status = put_plan(&s, plan, err);
    if (close(s.fd) < 0 && status == CT_OK) { /* NFS tells of a full disk only here */
        status = ct_fail_io(err, errno, "write", path);
    }
    return status == CT_OK ? ct_sync_file(path, err) : status;
}

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
    ct_status status = stream_to(plan, beside, err);
    if (status == CT_OK && rename(beside, path) < 0) {
        status = ct_fail_io(err, errno, "write", path);
    }
    if (status != CT_OK) {
        (void)remove(beside);
    }
    else {
        status = sync_folder_of(beside, err);
    }
    ct_free(beside);
    return status;
}
