/* Reading files in parallel, with checksums.
 *
 * Extents are divided into portions of a fixed size and their checksums are combined in
 * order, so that the result does not depend on the number of threads.
 *
 * Reading and summing take turns over blocks that fit the cache, as a second pass over
 * gigabytes would read all of the memory again. Every portion has an error of its own:
 * threads write to no shared memory. */
#define _POSIX_C_SOURCE 200809L
#include "core/checkpoint/source.h"

#include "core/base/alloc.h"
#include "core/base/crc.h"
#include "core/base/io.h"
#include "core/base/pool.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum {
    PORTION_BYTES = 4 << 20, /* read by a thread at a time */
    BLOCK_BYTES = 128 << 10  /* summed while the cache has the block */
};

void
ct_source_close(ct_source *source)
{
    if (source->fd >= 0) {
        (void)close(source->fd);
        source->fd = -1;
    }
}

/* The code in err is the status, so a local error stands in for NULL. */
ct_status
ct_source_open(ct_source *source, const char *path, const ct_expected *expected,
               ct_error *err)
{
    ct_error unseen;
    err = err == NULL ? &unseen : err;
    *source = (ct_source){.path = path, .fd = -1};
    source->fd = ct_open_read(path, &source->bytes, err);
    if (source->fd < 0) {
        return err->code;
    }
    if (expected == NULL || source->bytes == expected->bytes) {
        return CT_OK;
    }
    ct_status status =
        ct_fail(err, CT_EINVAL, "%s: is %llu bytes long, was written as %llu", path,
                (unsigned long long)source->bytes, (unsigned long long)expected->bytes);
    ct_source_close(source);
    return status;
}

ct_status
ct_source_read(const ct_source *source, void *data, size_t n, uint64_t offset,
               ct_error *err)
{
    /* Also for open files: the size at the opening has been compared with the manifest,
     * and later growth is not read. */
    if (offset > source->bytes || n > source->bytes - offset) {
        return ct_fail(err, CT_EINVAL, "%s: is cut short", source->path);
    }
    if (source->fd >= 0) {
        return ct_read_at(source->fd, data, n, offset, source->path, err);
    }
    if (n > 0 && data != NULL) {
        memcpy(data, source->memory + offset, n);
    }
    return CT_OK;
}

/* A batch of the pool. */
typedef struct portion {
    const ct_source *source;
    size_t extent; /* the extent of this portion */
    uint64_t offset;
    size_t n;
    unsigned char *target; /* NULL: only summed */
    ct_sum sum;
    uint32_t crc;
    ct_error err;
} portion;

static void
read_portion(void *arg, size_t batch)
{
    portion *p = (portion *)arg + batch;
    /* Skipped tensors are summed too, though nobody wants their bytes. */
    unsigned char *scratch = p->target == NULL ? ct_alloc(BLOCK_BYTES) : NULL;
    p->err = (ct_error){.code = CT_OK};
    if (p->target == NULL && scratch == NULL) {
        (void)!ct_fail(&p->err, CT_ENOMEM, "no memory to read %s", p->source->path);
    }
    for (size_t at = 0; at < p->n && p->err.code == CT_OK; at += BLOCK_BYTES) {
        size_t n = p->n - at < BLOCK_BYTES ? p->n - at : BLOCK_BYTES;
        unsigned char *to = p->target == NULL ? scratch : p->target + at;
        if (ct_source_read(p->source, to, n, p->offset + at, &p->err) != CT_OK) {
            break;
        }
        if (p->sum != CT_SUM_NONE) {
            p->crc = p->sum == CT_SUM_CRC32 ? ct_crc32(p->crc, to, n)
                                            : ct_crc32c(p->crc, to, n);
        }
    }
    ct_free(scratch);
}

/* Divides every extent into portions, or with portions NULL counts them. Two calls, so
 * that all portions fit one allocation. */
static size_t
partition(const ct_source *source, const ct_extent *extents, size_t n, ct_sum sum,
          portion *portions)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        const ct_extent *e = &extents[i];
        if (e->target == NULL && sum == CT_SUM_NONE) {
            continue;
        }
        for (uint64_t at = 0; at < e->n; at += PORTION_BYTES, count++) {
            uint64_t left = e->n - at;
            if (portions == NULL) {
                continue;
            }
            portions[count] = (portion){
                .source = source,
                .extent = i,
                .offset = e->offset + at,
                .n = left < PORTION_BYTES ? (size_t)left : PORTION_BYTES,
                .target = e->target == NULL ? NULL : (unsigned char *)e->target + at,
                .sum = sum,
            };
        }
    }
    return count;
}

/* Joins the portions' checksums in the order of the source. The first failure in this
 * order is reported, whatever thread failed first. */
static ct_status
join(ct_extent *extents, const portion *portions, size_t n, ct_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const portion *p = &portions[i];
        ct_extent *e = &extents[p->extent];
        if (p->err.code != CT_OK) {
            if (err != NULL) {
                *err = p->err;
            }
            return p->err.code;
        }
        if (p->sum != CT_SUM_NONE) {
            e->crc = p->sum == CT_SUM_CRC32 ? ct_crc32_combine(e->crc, p->crc, p->n)
                                            : ct_crc32c_combine(e->crc, p->crc, p->n);
        }
    }
    return CT_OK;
}

ct_status
ct_source_read_extents(const ct_source *source, ct_extent *extents, size_t n,
                       ct_sum sum, ct_error *err)
{
    size_t count = partition(source, extents, n, sum, NULL);
    portion *portions = ct_calloc(count + 1, sizeof *portions);
    if (portions == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", source->path);
    }
    for (size_t i = 0; i < n; i++) {
        extents[i].crc = 0;
    }
    (void)partition(source, extents, n, sum, portions);
    ct_pool_run(read_portion, portions, count);
    ct_status status = join(extents, portions, count, err);
    ct_free(portions);
    return status;
}

ct_status
ct_source_judge(const ct_source *source, const ct_expected *expected, uint32_t crc32c,
                ct_error *err)
{
    return crc32c == expected->crc32c
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "%s: is damaged: checksum %08x, written as %08x", source->path,
                         crc32c, expected->crc32c);
}

ct_status
ct_checksum_file(const char *path, const ct_expected *expected, ct_expected *found,
                 ct_error *err)
{
    ct_source source;
    ct_status status = ct_source_open(&source, path, expected, err);
    if (status != CT_OK) {
        return status;
    }
    ct_extent whole = {.n = source.bytes};
    status = ct_source_read_extents(&source, &whole, 1, CT_SUM_CRC32C, err);
    if (status == CT_OK && expected != NULL) {
        status = ct_source_judge(&source, expected, whole.crc, err);
    }
    ct_source_close(&source);
    *found = (ct_expected){source.bytes, whole.crc};
    return status;
}
