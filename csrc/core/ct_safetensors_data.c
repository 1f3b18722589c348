/* Reading the data of an open safetensors file, straight to where it belongs. */
#define _POSIX_C_SOURCE 200809L
#include "core/ct_safetensors_file.h"

#include "core/ct_alloc.h"
#include "core/ct_crc32c.h"
#include "core/ct_io.h"
#include "core/ct_pool.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    PORTION_BYTES = 4 << 20, /* read by one thread at a time */
    BLOCK_BYTES = 128 << 10, /* summed while it is still in the cache */
    CRC_DIGITS = 8
};

const ct_st_tensor *
ct_st_tensors_borrow(const ct_st_file *file, size_t *n)
{
    *n = file->n_tensors;
    return file->tensors;
}

const ct_st_pair *
ct_st_metadata_borrow(const ct_st_file *file, size_t *n)
{
    *n = file->n_metadata;
    return file->metadata;
}

static int
compare_to_name(const void *key, const void *item)
{
    const ct_text *name = key;
    const ct_st_name *entry = item;
    return ct_text_compare(*name, entry->name);
}

const ct_st_tensor *
ct_st_find_borrow(const ct_st_file *file, ct_text name)
{
    const ct_st_name *found = bsearch(&name, file->by_name, file->n_tensors,
                                      sizeof(ct_st_name), compare_to_name);
    return found == NULL ? NULL : &file->tensors[found->index];
}

/* The checksum that the file carries; false if it has none. */
static bool
find_crc(const ct_st_file *file, uint32_t *crc)
{
    for (size_t i = 0; i < file->n_metadata; i++) {
        const ct_st_pair *pair = &file->metadata[i];
        char digits[CRC_DIGITS + 1] = {0};
        char *end = NULL;
        if (!ct_text_is(pair->key, CT_ST_CRC_KEY) || pair->value.n != CRC_DIGITS) {
            continue;
        }
        for (int k = 0; k < CRC_DIGITS; k++) {
            digits[k] = pair->value.data[k];
        }
        *crc = (uint32_t)strtoul(digits, &end, 16);
        return end == digits + CRC_DIGITS;
    }
    return false;
}

/* One batch of the pool: bytes of the file, read, summed, or both. */
typedef struct portion {
    int fd;
    uint64_t offset;
    size_t n;
    unsigned char *target; /* NULL: only summed */
    bool check;
    uint32_t crc;
    int failed; /* errno; -1 where the file ended too soon */
} portion;

static void
read_block(portion *p, size_t at, size_t n, unsigned char *to)
{
    size_t done = 0;
    while (done < n && p->failed == 0) {
        ssize_t got = pread(p->fd, to + done, n - done, (off_t)(p->offset + at + done));
        if (got > 0) {
            done += (size_t)got;
        }
        else if (got == 0 || errno != EINTR) {
            p->failed = got == 0 ? -1 : errno;
        }
    }
    if (p->check && p->failed == 0) {
        p->crc = ct_crc32c(p->crc, to, n);
    }
}

static void
read_portion(void *arg, size_t batch)
{
    portion *p = (portion *)arg + batch;
    unsigned char *scratch = p->target == NULL ? ct_alloc(BLOCK_BYTES) : NULL;
    if (p->target == NULL && scratch == NULL) {
        p->failed = ENOMEM;
    }
    for (size_t at = 0; at < p->n && p->failed == 0; at += BLOCK_BYTES) {
        size_t n = p->n - at < BLOCK_BYTES ? p->n - at : BLOCK_BYTES;
        read_block(p, at, n, p->target == NULL ? scratch : p->target + at);
    }
    ct_free(scratch);
}

/* Cuts every wanted tensor into portions; with portions NULL only counts them. */
static size_t
cut(const ct_st_file *file, void *const *targets, bool check, portion *portions)
{
    size_t n = 0;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const ct_st_tensor *t = &file->tensors[i];
        if (targets[i] == NULL && !check) {
            continue;
        }
        for (uint64_t at = t->begin; at < t->end; at += PORTION_BYTES, n++) {
            uint64_t left = t->end - at;
            if (portions == NULL) {
                continue;
            }
            portions[n] = (portion){
                .fd = file->fd,
                .offset = at,
                .n = left < PORTION_BYTES ? (size_t)left : PORTION_BYTES,
                .target = targets[i] == NULL
                              ? NULL
                              : (unsigned char *)targets[i] + (at - t->begin),
                .check = check,
            };
        }
    }
    return n;
}

static ct_status
judge(const ct_st_file *file, const portion *portions, size_t n, bool check,
      uint32_t expected, ct_error *err)
{
    uint32_t crc = 0;
    for (size_t i = 0; i < n; i++) {
        if (portions[i].failed == -1) {
            return ct_fail(err, CT_EINVAL, "%s: was cut short while it was read",
                           file->path);
        }
        if (portions[i].failed != 0) {
            return ct_fail_io(err, portions[i].failed, "read", file->path);
        }
        crc = check ? ct_crc32c_combine(crc, portions[i].crc, portions[i].n) : 0;
    }
    if (check && crc != expected) {
        return ct_fail(err, CT_EINVAL,
                       "%s: its data is damaged: checksum %08x, written as %08x",
                       file->path, crc, expected);
    }
    return CT_OK;
}

ct_status
ct_st_read(const ct_st_file *file, void *const *targets, bool check, ct_error *err)
{
    uint32_t expected = 0;
    check = check && find_crc(file, &expected);
    size_t n = cut(file, targets, check, NULL);
    portion *portions = ct_calloc(n + 1, sizeof *portions);
    if (portions == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", file->path);
    }
    (void)cut(file, targets, check, portions);
    ct_pool_run(read_portion, portions, n);
    ct_status status = judge(file, portions, n, check, expected, err);
    ct_free(portions);
    return status;
}
