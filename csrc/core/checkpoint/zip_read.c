/* Reading archives: a hostile directory must cost an error message and no more. */
#include "core/base/alloc.h"
#include "core/base/crc32c.h"
#include "core/checkpoint/zip.h"
#include "core/checkpoint/zip_format.h"

#include <stdlib.h>
#include <string.h>

/* More than a million records with long names; what claims more is refused unread. */
#define DIRECTORY_LIMIT (256u << 20)

/* Where the directory is, as the end of the archive says. */
typedef struct ending {
    uint64_t n_records, directory, directory_bytes;
    uint64_t at; /* of the first end record: the directory stops here */
} ending;

static ct_status
fail(const ct_source *source, const char *message, ct_error *err)
{
    return ct_fail(err, CT_EINVAL, "%s: damaged archive: %s", source->path, message);
}

static ct_status
fail_record(const ct_source *source, ct_text name, const char *message, ct_error *err)
{
    return ct_fail(err, CT_EINVAL, "%s: damaged archive: record '%.*s' %s",
                   source->path, (int)(name.n < 80 ? name.n : 80), name.data, message);
}

/* The 64-bit end record, if a locator stands before the end record. */
static ct_status
read_end64(const ct_source *source, ending *e, ct_error *err)
{
    unsigned char locator[ZIP_LOCATOR64_BYTES], record[ZIP_END64_BYTES];
    if (e->at < ZIP_LOCATOR64_BYTES) {
        return CT_OK;
    }
    ct_status status =
        ct_source_read(source, locator, sizeof locator, e->at - sizeof locator, err);
    if (status != CT_OK || ct_load_le32(locator) != ZIP_LOCATOR64_SIGNATURE) {
        return status;
    }
    uint64_t at = ct_load_le64(locator + 8);
    if (at != e->at - sizeof locator - sizeof record) {
        return fail(source, "no 64-bit end record where it should be", err);
    }
    status = ct_source_read(source, record, sizeof record, at, err);
    if (status == CT_OK && ct_load_le32(record) != ZIP_END64_SIGNATURE) {
        status = fail(source, "no 64-bit end record where it should be", err);
    }
    if (status == CT_OK) {
        *e = (ending){.n_records = ct_load_le64(record + 32),
                      .directory_bytes = ct_load_le64(record + 40),
                      .directory = ct_load_le64(record + 48),
                      .at = at};
    }
    return status;
}

/* torch writes no comment: the end record is the file's end. */
static ct_status
read_end(const ct_source *source, ending *e, ct_error *err)
{
    static const char missing[] = "no end record: cut short, followed by something "
                                  "else, or not written by torch.save";
    unsigned char end[ZIP_END_BYTES];
    if (source->bytes < sizeof end) {
        return fail(source, missing, err);
    }
    e->at = source->bytes - sizeof end;
    ct_status status = ct_source_read(source, end, sizeof end, e->at, err);
    if (status != CT_OK) {
        return status;
    }
    if (ct_load_le32(end) != ZIP_END_SIGNATURE || ct_load_le16(end + 20) != 0) {
        return fail(source, missing, err);
    }
    e->n_records = ct_load_le16(end + 10);
    e->directory_bytes = ct_load_le32(end + 12);
    e->directory = ct_load_le32(end + 16);
    status = read_end64(source, e, err);
    if (status == CT_OK &&
        (e->directory > e->at || e->directory_bytes != e->at - e->directory ||
         e->directory_bytes > DIRECTORY_LIMIT ||
         e->n_records > e->directory_bytes / ZIP_CENTRAL_BYTES)) {
        return fail(source, "its end does not fit its directory", err);
    }
    return status;
}

/* Replaces fields that stand for 64-bit ones by those of the extra field; until the
 * record's header is read, offset is where that is. */
static bool
widen(ct_zip_entry *r, const unsigned char *extra, size_t n)
{
    while (n >= 4) {
        size_t length = ct_load_le16(extra + 2);
        if (length > n - 4) {
            return false;
        }
        if (ct_load_le16(extra) == ZIP_EXTRA64) {
            bool wide_size = r->bytes == ZIP_MAX32, wide_at = r->offset == ZIP_MAX32;
            if (length < (wide_size ? 16u : 0u) + (wide_at ? 8u : 0u)) {
                return false;
            }
            r->bytes = wide_size ? ct_load_le64(extra + 4) : r->bytes;
            r->offset =
                wide_at ? ct_load_le64(extra + 4 + (wide_size ? 16 : 0)) : r->offset;
            return true;
        }
        extra += 4 + length;
        n -= 4 + length;
    }
    return r->bytes != ZIP_MAX32 && r->offset != ZIP_MAX32;
}

/* Parses the directory entry at *at of directory[0..n) and moves *at past it. */
static ct_status
parse_entry(const ct_source *source, const unsigned char *directory, size_t n,
            size_t *at, ct_zip_entry *r, ct_error *err)
{
    const unsigned char *entry = directory + *at;
    if (n - *at < ZIP_CENTRAL_BYTES || ct_load_le32(entry) != ZIP_CENTRAL_SIGNATURE) {
        return fail(source, "an entry of its directory is malformed", err);
    }
    size_t name = ct_load_le16(entry + 28), extra = ct_load_le16(entry + 30);
    size_t length = ZIP_CENTRAL_BYTES + name + extra + ct_load_le16(entry + 32);
    if (length > n - *at) {
        return fail(source, "an entry of its directory is cut short", err);
    }
    *r = (ct_zip_entry){
        .name = {(const char *)entry + ZIP_CENTRAL_BYTES, name},
        .crc = ct_load_le32(entry + ZIP_CENTRAL_CRC),
        .bytes = ct_load_le32(entry + 24),
        .offset = ct_load_le32(entry + 42),
    };
    if (ct_load_le16(entry + 10) != 0) {
        return fail_record(source, r->name,
                           "is compressed, which torch.save never does", err);
    }
    if (!widen(r, entry + ZIP_CENTRAL_BYTES + name, extra)) {
        return fail_record(source, r->name, "lacks a 64-bit size", err);
    }
    *at += length;
    return CT_OK;
}

/* Moves offset from the record's header, whose name must be the directory's, to the
 * data behind it. */
static ct_status
find_data(const ct_source *source, ct_zip_entry *r, uint64_t end, ct_error *err)
{
    unsigned char local[ZIP_LOCAL_BYTES];
    ct_status status = ct_source_read(source, local, sizeof local, r->offset, err);
    if (status == CT_OK && ct_load_le32(local) != ZIP_LOCAL_SIGNATURE) {
        status =
            fail_record(source, r->name, "has no header where the directory says", err);
    }
    if (status != CT_OK) {
        return status;
    }
    size_t name = ct_load_le16(local + 26), extra = ct_load_le16(local + 28);
    char *own = ct_alloc(name + 1);
    if (own == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", source->path);
    }
    status = ct_source_read(source, own, name, r->offset + sizeof local, err);
    if (status == CT_OK && ct_text_compare((ct_text){own, name}, r->name) != 0) {
        status = fail_record(source, r->name, "has another name in its header", err);
    }
    ct_free(own);
    r->offset += sizeof local + name + extra;
    if (status == CT_OK && (r->offset > end || r->bytes > end - r->offset)) {
        status = fail_record(source, r->name, "reaches past the end", err);
    }
    return status;
}

static int
compare_offsets(const void *left, const void *right)
{
    const ct_zip_entry *a = left, *b = right;
    return (a->offset > b->offset) - (a->offset < b->offset);
}

static int
compare_names(const void *left, const void *right)
{
    const ct_zip_entry *a = left, *b = right;
    return ct_text_compare(a->name, b->name);
}

/* No two of one name, and none over another; leaves them in the order of the data. */
static ct_status
check_entries(const ct_source *source, ct_zip_index *index, ct_error *err)
{
    ct_zip_entry *e = index->entries;
    if (index->n == 0) {
        return CT_OK;
    }
    qsort(e, index->n, sizeof *e, compare_names);
    for (size_t i = 1; i < index->n; i++) {
        if (compare_names(&e[i - 1], &e[i]) == 0) {
            return fail_record(source, e[i].name, "is there twice", err);
        }
    }
    qsort(e, index->n, sizeof *e, compare_offsets);
    for (size_t i = 1; i < index->n; i++) {
        if (e[i].offset - e[i - 1].offset < e[i - 1].bytes) {
            return fail_record(source, e[i].name, "overlaps another", err);
        }
    }
    return CT_OK;
}

void
ct_zip_index_fini(ct_zip_index *index)
{
    ct_free(index->entries);
    ct_free(index->directory);
    *index = (ct_zip_index){0};
}

bool
ct_zip_is(const ct_source *source)
{
    unsigned char head[4];
    return source->bytes >= sizeof head &&
           ct_source_read(source, head, sizeof head, 0, NULL) == CT_OK &&
           ct_load_le32(head) == ZIP_LOCAL_SIGNATURE;
}

static ct_status
read_entries(ct_zip_index *index, const ct_source *source, const ending *e,
             ct_error *err)
{
    size_t at = 0, bytes = (size_t)e->directory_bytes;
    index->directory = ct_alloc(bytes + 1);
    index->entries = ct_calloc((size_t)e->n_records + 1, sizeof *index->entries);
    if (index->directory == NULL || index->entries == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", source->path);
    }
    ct_status status =
        ct_source_read(source, index->directory, bytes, e->directory, err);
    while (status == CT_OK && index->n < e->n_records) {
        ct_zip_entry *entry = &index->entries[index->n++];
        status = parse_entry(source, index->directory, bytes, &at, entry, err);
        if (status == CT_OK) {
            status = find_data(source, entry, e->directory, err);
        }
    }
    if (status == CT_OK && at != bytes) {
        status = fail(source, "its directory has entries that its end leaves out", err);
    }
    return status == CT_OK ? check_entries(source, index, err) : status;
}

ct_status
ct_zip_index_read(ct_zip_index *index, const ct_source *source, ct_error *err)
{
    ending e = {0};
    ct_zip_index made = {0};
    ct_status status = read_end(source, &e, err);
    if (status == CT_OK) {
        status = read_entries(&made, source, &e, err);
    }
    if (status != CT_OK) {
        ct_zip_index_fini(&made);
        return status;
    }
    *index = made;
    return CT_OK;
}

/* Records and what is between them, so that the whole source is covered; returns how
 * many extents that is. Record i is extent 2 i + 1. */
static size_t
cover(const ct_zip_index *index, const ct_source *source, void *const *targets,
      ct_extent *extents)
{
    uint64_t at = 0;
    size_t n = 0;
    for (size_t i = 0; i < index->n; i++) {
        const ct_zip_entry *e = &index->entries[i];
        extents[n++] = (ct_extent){.offset = at, .n = e->offset - at};
        extents[n++] =
            (ct_extent){.offset = e->offset, .n = e->bytes, .target = targets[i]};
        at = e->offset + e->bytes;
    }
    extents[n++] = (ct_extent){.offset = at, .n = source->bytes - at};
    return n;
}

static ct_status
judge(const ct_zip_index *index, const ct_source *source, const ct_extent *extents,
      size_t n, const ct_expected *expected, ct_error *err)
{
    uint32_t crc = 0;
    if (expected != NULL) {
        for (size_t i = 0; i < n; i++) {
            crc = ct_crc32c_combine(crc, extents[i].crc, extents[i].n);
        }
        return ct_source_judge(source, expected, crc, err);
    }
    for (size_t i = 0; i < index->n; i++) {
        const ct_zip_entry *e = &index->entries[i];
        if (extents[2 * i + 1].crc != e->crc) {
            return ct_fail(
                err, CT_EINVAL,
                "%s: record '%.*s' is damaged: checksum %08x, written as %08x",
                source->path, (int)(e->name.n < 80 ? e->name.n : 80), e->name.data,
                extents[2 * i + 1].crc, e->crc);
        }
    }
    return CT_OK;
}

ct_status
ct_zip_read(const ct_zip_index *index, const ct_source *source, void *const *targets,
            const ct_expected *expected, ct_error *err)
{
    ct_extent *extents = ct_calloc(2 * index->n + 1, sizeof *extents);
    if (extents == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", source->path);
    }
    size_t n = cover(index, source, targets, extents);
    ct_status status = ct_source_read_extents(
        source, extents, n, expected == NULL ? CT_SUM_CRC32 : CT_SUM_CRC32C, err);
    if (status == CT_OK) {
        status = judge(index, source, extents, n, expected, err);
    }
    ct_free(extents);
    return status;
}

static ct_status
read_nowhere(const ct_source *source, const ct_expected *expected, ct_error *err)
{
    ct_zip_index index = {0};
    ct_status status = ct_zip_index_read(&index, source, err);
    if (status != CT_OK) {
        return status;
    }
    void **nowhere = (void **)ct_calloc(index.n + 1, sizeof(void *));
    status = nowhere == NULL
                 ? ct_fail(err, CT_ENOMEM, "no memory to read %s", source->path)
                 : ct_zip_read(&index, source, nowhere, expected, err);
    ct_free((void *)nowhere);
    ct_zip_index_fini(&index);
    return status;
}

ct_status
ct_zip_verify(const char *path, const ct_expected *expected, ct_error *err)
{
    ct_source source;
    ct_status status = ct_source_open(&source, path, expected, err);
    if (status == CT_OK) {
        status = read_nowhere(&source, expected, err);
        ct_source_close(&source);
    }
    return status;
}
