/* Verifying an archive: directory, headers, checksum of every record. */
#define _POSIX_C_SOURCE 200809L
#include "core/ct_alloc.h"
#include "core/ct_crc32.h"
#include "core/ct_io.h"
#include "core/ct_zip.h"
#include "core/ct_zip_format.h"

#include <string.h>
#include <unistd.h>

enum {
    BLOCK_BYTES = 1 << 20,
    COMMENT_LIMIT = 65535
};

typedef struct archive {
    const char *path;
    int fd;
    uint64_t bytes;
    uint64_t n_records, directory, directory_bytes;
} archive;

static ct_status
fail(const archive *a, const char *message, ct_error *err)
{
    return ct_fail(err, CT_EINVAL, "%s: damaged archive: %s", a->path, message);
}

static ct_status
read_at(const archive *a, void *data, size_t n, uint64_t offset, ct_error *err)
{
    if (offset > a->bytes || n > a->bytes - offset) {
        return fail(a, "cut short", err);
    }
    return ct_read_at(a->fd, data, n, offset, a->path, err);
}

/* The 64-bit end record, if a locator stands before the end record at `end`. */
static ct_status
read_end64(archive *a, uint64_t end, ct_error *err)
{
    unsigned char locator[ZIP_LOCATOR64_BYTES], record[ZIP_END64_BYTES];
    if (end < ZIP_LOCATOR64_BYTES) {
        return CT_OK;
    }
    ct_status status =
        read_at(a, locator, sizeof locator, end - ZIP_LOCATOR64_BYTES, err);
    if (status != CT_OK || ct_load_le32(locator) != ZIP_LOCATOR64_SIGNATURE) {
        return status;
    }
    status = read_at(a, record, sizeof record, ct_load_le64(locator + 8), err);
    if (status == CT_OK && ct_load_le32(record) != ZIP_END64_SIGNATURE) {
        status = fail(a, "no 64-bit end record where it should be", err);
    }
    if (status == CT_OK) {
        a->n_records = ct_load_le64(record + 32);
        a->directory_bytes = ct_load_le64(record + 40);
        a->directory = ct_load_le64(record + 48);
    }
    return status;
}

/* Searches backwards, as a comment of any length may follow the end record. */
static ct_status
find_end(archive *a, ct_error *err)
{
    unsigned char tail[ZIP_END_BYTES + COMMENT_LIMIT];
    size_t n = a->bytes < sizeof tail ? (size_t)a->bytes : sizeof tail;
    ct_status status = read_at(a, tail, n, a->bytes - n, err);
    if (status != CT_OK) {
        return status;
    }
    for (size_t at = n < ZIP_END_BYTES ? 0 : n - ZIP_END_BYTES + 1; at > 0; at--) {
        const unsigned char *end = tail + at - 1;
        if (ct_load_le32(end) == ZIP_END_SIGNATURE) {
            a->n_records = ct_load_le16(end + 10);
            a->directory_bytes = ct_load_le32(end + 12);
            a->directory = ct_load_le32(end + 16);
            return read_end64(a, a->bytes - n + at - 1, err);
        }
    }
    return fail(a, "no end record: cut short, or not written by torch.save", err);
}

typedef struct record {
    char name[80];
    uint32_t crc;
    uint64_t bytes, at;
} record;

/* Replaces fields that stand for 64-bit ones by those of the extra field. */
static bool
widen(record *r, const unsigned char *extra, size_t n)
{
    while (n >= 4) {
        size_t length = ct_load_le16(extra + 2);
        if (length > n - 4) {
            return false;
        }
        if (ct_load_le16(extra) == ZIP_EXTRA64) {
            bool wide_size = r->bytes == ZIP_MAX32, wide_at = r->at == ZIP_MAX32;
            if (length < (wide_size ? 16u : 0u) + (wide_at ? 8u : 0u)) {
                return false;
            }
            r->bytes = wide_size ? ct_load_le64(extra + 4) : r->bytes;
            r->at = wide_at ? ct_load_le64(extra + 4 + (wide_size ? 16 : 0)) : r->at;
            return true;
        }
        extra += 4 + length;
        n -= 4 + length;
    }
    return r->bytes != ZIP_MAX32 && r->at != ZIP_MAX32;
}

/* Parses the directory entry at *at of directory[0..n) and moves *at past it. */
static ct_status
parse_entry(const archive *a, const unsigned char *directory, size_t n, size_t *at,
            record *r, ct_error *err)
{
    const unsigned char *entry = directory + *at;
    if (n - *at < ZIP_CENTRAL_BYTES || ct_load_le32(entry) != ZIP_CENTRAL_SIGNATURE) {
        return fail(a, "an entry of its directory is malformed", err);
    }
    size_t name = ct_load_le16(entry + 28), extra = ct_load_le16(entry + 30);
    size_t length = ZIP_CENTRAL_BYTES + name + extra + ct_load_le16(entry + 32);
    if (length > n - *at) {
        return fail(a, "an entry of its directory is cut short", err);
    }
    if (ct_load_le16(entry + 10) != 0) {
        return fail(a, "a record is compressed, which torch.save never does", err);
    }
    size_t shown = name < sizeof r->name - 1 ? name : sizeof r->name - 1;
    memcpy(r->name, entry + ZIP_CENTRAL_BYTES, shown);
    r->name[shown] = '\0';
    r->crc = ct_load_le32(entry + ZIP_CENTRAL_CRC);
    r->bytes = ct_load_le32(entry + 24);
    r->at = ct_load_le32(entry + 42);
    if (!widen(r, entry + ZIP_CENTRAL_BYTES + name, extra)) {
        return fail(a, "a 64-bit size is missing", err);
    }
    *at += length;
    return CT_OK;
}

static ct_status
check_record(const archive *a, const record *r, unsigned char *block, ct_error *err)
{
    unsigned char local[ZIP_LOCAL_BYTES];
    uint32_t crc = 0;
    ct_status status = read_at(a, local, sizeof local, r->at, err);
    if (status == CT_OK && ct_load_le32(local) != ZIP_LOCAL_SIGNATURE) {
        status = fail(a, "a record's header is not where the directory says", err);
    }
    if (status != CT_OK) {
        return status;
    }
    uint64_t at =
        r->at + ZIP_LOCAL_BYTES + ct_load_le16(local + 26) + ct_load_le16(local + 28);
    if (at > a->bytes || r->bytes > a->bytes - at) {
        return fail(a, "a record reaches past the end", err);
    }
    for (uint64_t left = r->bytes; left > 0;) {
        size_t n = left < BLOCK_BYTES ? (size_t)left : BLOCK_BYTES;
        status = read_at(a, block, n, at, err);
        if (status != CT_OK) {
            return status;
        }
        crc = ct_crc32(crc, block, n);
        at += n;
        left -= n;
    }
    if (crc != r->crc) {
        return ct_fail(err, CT_EINVAL,
                       "%s: record '%s' is damaged: checksum %08x, written as %08x",
                       a->path, r->name, crc, r->crc);
    }
    return CT_OK;
}

static ct_status
check_records(const archive *a, const unsigned char *directory, unsigned char *block,
              ct_error *err)
{
    size_t at = 0;
    ct_status status = CT_OK;
    for (uint64_t i = 0; i < a->n_records && status == CT_OK; i++) {
        record r = {.crc = 0};
        status = parse_entry(a, directory, (size_t)a->directory_bytes, &at, &r, err);
        if (status == CT_OK) {
            status = check_record(a, &r, block, err);
        }
    }
    return status;
}

static ct_status
check_archive(archive *a, ct_error *err)
{
    unsigned char *directory = NULL, *block = NULL;
    ct_status status = find_end(a, err);
    if (status != CT_OK) {
        return status;
    }
    if (a->directory > a->bytes || a->directory_bytes > a->bytes - a->directory) {
        return fail(a, "its directory reaches past the end", err);
    }
    directory = ct_alloc((size_t)a->directory_bytes + 1);
    block = ct_alloc(BLOCK_BYTES);
    if (directory != NULL && block != NULL) {
        status = read_at(a, directory, (size_t)a->directory_bytes, a->directory, err);
        if (status == CT_OK) {
            status = check_records(a, directory, block, err);
        }
    }
    else {
        status = ct_fail(err, CT_ENOMEM, "no memory to read %s", a->path);
    }
    ct_free(block);
    ct_free(directory);
    return status;
}

ct_status
ct_zip_verify(const char *path, ct_error *err)
{
    archive a = {.path = path};
    a.fd = ct_open_read(path, &a.bytes, err);
    if (a.fd < 0) {
        return CT_EIO;
    }
    ct_status status = check_archive(&a, err);
    (void)close(a.fd);
    return status;
}
