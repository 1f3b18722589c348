/* Writing and reading the archives of torch.save.
 *
 * The writer leaves the checksums blank for patches, as all data comes later. The
 * reader trusts nothing: sizes and offsets are compared with the file and with each
 * other before data is read, so that a hostile directory costs an error message and
 * no more. */
#include "core/checkpoint/zip.h"

#include "core/base/alloc.h"
#include "core/base/crc.h"

#include <stdlib.h>
#include <string.h>

/* Signatures, sizes and field offsets of a ZIP archive, for its writer and reader. */

enum {
    ZIP_LOCAL_SIGNATURE = 0x04034b50,
    ZIP_CENTRAL_SIGNATURE = 0x02014b50,
    ZIP_END_SIGNATURE = 0x06054b50,
    ZIP_END64_SIGNATURE = 0x06064b50,
    ZIP_LOCATOR64_SIGNATURE = 0x07064b50,

    ZIP_LOCAL_BYTES = 30,
    ZIP_CENTRAL_BYTES = 46,
    ZIP_END_BYTES = 22,
    ZIP_END64_BYTES = 56,
    ZIP_LOCATOR64_BYTES = 20,

    ZIP_LOCAL_CRC = 14,
    ZIP_CENTRAL_CRC = 16,

    ZIP_VERSION = 20,
    ZIP_VERSION64 = 45,
    ZIP_UTF8 = 0x0800,    /* flag: names are UTF-8 */
    ZIP_EXTRA64 = 0x0001, /* extra field with sizes of 64 bits */
    ZIP_EXTRA_PAD = 0x4246,
    ZIP_DATE = 0x0021 /* 1980-01-01: the same bytes for the same content */
};

#define ZIP_MAX32 0xffffffffu /* in a 32-bit field: the value is in a 64-bit field */
#define ZIP_MAX16 0xffffu

enum {
    ALIGNMENT = 64,
    EXTRA64_BYTES = 20, /* id, length, two sizes */
    EXTRA_HEADER_BYTES = 4
};

/* Fields appended in order; the first failure stays, later fields are dropped. */
typedef struct fields {
    ct_buf *buf;
    ct_error *err;
    ct_status status;
} fields;

/* Little-endian fields of widths[i] - '0' bytes. */
static void
put(fields *f, const char *widths, const uint64_t *values)
{
    for (; *widths != '\0' && f->status == CT_OK; widths++, values++) {
        unsigned char bytes[8];
        ct_store_le64(bytes, *values);
        f->status = ct_buf_add(f->buf, bytes, (size_t)(*widths - '0'), f->err);
    }
}

static void
put_name(fields *f, const char *name)
{
    if (f->status == CT_OK) {
        f->status = ct_buf_text(f->buf, name, f->err);
    }
}

/* The largest value announces a 64-bit field elsewhere (APPNOTE, 4.5.3). */
static uint64_t
or_max32(uint64_t value)
{
    return value < ZIP_MAX32 ? value : ZIP_MAX32;
}

/* The fields of both a local and a central header, from the version needed to the
 * length of the name. The checksum is patched later. */
static void
put_common(fields *f, const ct_zip_record *record, bool wide)
{
    const uint64_t bytes = or_max32(record->bytes);
    put(f, "222224442",
        (const uint64_t[]){wide ? ZIP_VERSION64 : ZIP_VERSION, ZIP_UTF8, 0 /* stored */,
                           0 /* midnight */, ZIP_DATE, 0, bytes, bytes,
                           strlen(record->name)});
}

/* The padding that aligns the data of a record with its header at `at`. */
static size_t
padding_at(uint64_t at, const ct_zip_record *record, bool wide)
{
    uint64_t end = at + ZIP_LOCAL_BYTES + strlen(record->name) +
                   (wide ? EXTRA64_BYTES : 0) + EXTRA_HEADER_BYTES;
    return (size_t)((ALIGNMENT - end % ALIGNMENT) % ALIGNMENT);
}

static ct_status
add_data(ct_plan *plan, const ct_zip_record *record, ct_error *err)
{
    return record->n_excerpts > 0
               ? ct_plan_add_excerpts(plan, record->excerpts, record->n_excerpts, err)
               : ct_plan_add_data(plan, record->data, record->bytes, record->place,
                                  err);
}

static ct_status
add_local(ct_plan *plan, const ct_zip_record *record, ct_error *err)
{
    ct_buf buf = {0};
    fields f = {.buf = &buf, .err = err, .status = CT_OK};
    /* Sizes of 64 bits only if needed, as some readers lack 64-bit fields. */
    bool wide = record->bytes >= ZIP_MAX32;
    size_t pad = padding_at(plan->bytes, record, wide);
    put(&f, "4", (const uint64_t[]){ZIP_LOCAL_SIGNATURE});
    put_common(&f, record, wide);
    put(&f, "2",
        (const uint64_t[]){(wide ? EXTRA64_BYTES : 0u) + EXTRA_HEADER_BYTES + pad});
    put_name(&f, record->name);
    put(&f, wide ? "2288" : "",
        (const uint64_t[]){ZIP_EXTRA64, EXTRA64_BYTES - EXTRA_HEADER_BYTES,
                           record->bytes, record->bytes});
    /* torch aligns by an extra field of this number, filled with 'Z'. */
    put(&f, "22", (const uint64_t[]){ZIP_EXTRA_PAD, pad});
    if (f.status == CT_OK) {
        f.status = ct_buf_fill(&buf, 'Z', pad, err);
    }
    if (f.status == CT_OK) {
        f.status = ct_plan_add_buf(plan, &buf, err);
    }
    if (f.status == CT_OK) {
        f.status = add_data(plan, record, err);
    }
    ct_buf_fini(&buf);
    return f.status;
}

/* Only values that do not fit have a 64-bit field: both sizes, then the place, which a
 * local header has not. */
static void
put_central(fields *f, const ct_zip_record *record, uint64_t at)
{
    bool wide_size = record->bytes >= ZIP_MAX32, wide_at = at >= ZIP_MAX32;
    uint64_t extra = (wide_size ? 16u : 0u) + (wide_at ? 8u : 0u);
    put(f, "42",
        (const uint64_t[]){ZIP_CENTRAL_SIGNATURE, ZIP_VERSION64 /* made by */});
    put_common(f, record, wide_size || wide_at);
    put(f, "222244", /* extra, comment, disk, attributes inside and outside, place */
        (const uint64_t[]){extra > 0 ? extra + EXTRA_HEADER_BYTES : 0, 0, 0, 0, 0,
                           or_max32(at)});
    put_name(f, record->name);
    put(f, extra > 0 ? "22" : "", (const uint64_t[]){ZIP_EXTRA64, extra});
    put(f, wide_size ? "88" : "", (const uint64_t[]){record->bytes, record->bytes});
    put(f, wide_at ? "8" : "", (const uint64_t[]){at});
}

static void
put_end(fields *f, uint64_t n, uint64_t directory, uint64_t bytes)
{
    const uint64_t n16 = n < ZIP_MAX16 ? n : ZIP_MAX16;
    if (n16 == ZIP_MAX16 || directory >= ZIP_MAX32 || bytes >= ZIP_MAX32) {
        put(f, "4822448888", /* 12: bytes of the signature and of this length */
            (const uint64_t[]){ZIP_END64_SIGNATURE, ZIP_END64_BYTES - 12, ZIP_VERSION64,
                               ZIP_VERSION64, 0, 0, n, n, bytes, directory});
        put(f, "4484",
            (const uint64_t[]){ZIP_LOCATOR64_SIGNATURE, 0, directory + bytes, 1});
    }
    put(f, "42222442",
        (const uint64_t[]){ZIP_END_SIGNATURE, 0, 0, n16, n16, or_max32(bytes),
                           or_max32(directory), 0});
}

/* Record i is pieces 2i (header) and 2i + 1 (data); the directory is piece 2n. */
static ct_status
add_patches(ct_plan *plan, size_t record, size_t directory, size_t entry_at,
            ct_error *err)
{
    ct_patch local = {CT_PATCH_CRC32, .first = 2 * record + 1, .n = 1, .to = 2 * record,
                      .offset = ZIP_LOCAL_CRC};
    ct_patch central = local;
    central.to = directory;
    central.offset = entry_at + ZIP_CENTRAL_CRC;
    ct_status status = ct_plan_add_patch(plan, local, err);
    return status == CT_OK ? ct_plan_add_patch(plan, central, err) : status;
}

static ct_status
add_directory(ct_plan *plan, const ct_zip_record *records, size_t n, ct_error *err)
{
    ct_buf buf = {0};
    fields f = {.buf = &buf, .err = err, .status = CT_OK};
    uint64_t at = 0;
    for (size_t i = 0; i < n && f.status == CT_OK; i++) {
        size_t entry_at = buf.n;
        put_central(&f, &records[i], at);
        if (f.status == CT_OK) {
            f.status = add_patches(plan, i, 2 * n, entry_at, err);
        }
        /* Two pieces for each record, as add_local has added them. */
        at += plan->pieces[2 * i].n + plan->pieces[2 * i + 1].n;
    }
    put_end(&f, n, plan->bytes, buf.n);
    if (f.status == CT_OK) {
        f.status = ct_plan_add_buf(plan, &buf, err);
    }
    ct_buf_fini(&buf);
    return f.status;
}

ct_status
ct_zip_plan(ct_plan *plan, const ct_zip_record *records, size_t n, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; i < n && status == CT_OK; i++) {
        /* The length of a name is a field of two bytes. */
        status = strlen(records[i].name) >= ZIP_MAX16 / 2
                     ? ct_fail(err, CT_EINVAL, "a record's name is too long")
                     : add_local(plan, &records[i], err);
    }
    return status == CT_OK ? add_directory(plan, records, n, err) : status;
}

/* Reading archives: a hostile directory must cost an error message and no more. */

/* More than a million records with long names; a larger directory is rejected
 * unread. */
#define DIRECTORY_LIMIT (256u << 20)

/* The place of the directory in the end record. */
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
    /* torch writes the three records one behind the other; a gap would hide bytes. */
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
    /* The number of records bounds an allocation, and so is compared with the
     * directory's bytes. */
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

/* Reads the 64-bit values of the extra field. offset is the header's here. */
static bool
widen(ct_zip_entry *r, const unsigned char *extra, size_t n)
{
    while (n >= 4) {
        size_t length = ct_load_le16(extra + 2);
        /* A field that reaches past the end would move `extra` out of the entry. */
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

/* Parses the directory entry at *at of directory[0..n) and advances *at. */
static ct_status
parse_entry(const ct_source *source, const unsigned char *directory, size_t n,
            size_t *at, ct_zip_entry *r, ct_error *err)
{
    const unsigned char *entry = directory + *at;
    if (n - *at < ZIP_CENTRAL_BYTES || ct_load_le32(entry) != ZIP_CENTRAL_SIGNATURE) {
        return fail(source, "an entry of its directory is malformed", err);
    }
    /* Lengths of two bytes: the sum cannot overflow. */
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

/* Advances offset from the record's header, which must have the directory's name, to
 * the data. */
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
    /* The header's own lengths: the directory's extra field has no padding. */
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

/* Rejects equal names and overlaps; leaves the entries in the order of the data. */
static ct_status
check_entries(const ct_source *source, ct_zip_index *index, ct_error *err)
{
    ct_zip_entry *e = index->entries;
    if (index->n == 0) {
        return CT_OK;
    }
    /* Two orders show two kinds of damage between neighbours; the second order
     * stays. */
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
    /* Names point into this copy, which the index keeps. */
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
    /* Built aside, so that a failure leaves *index unchanged. */
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

/* The records and the bytes between them, so that the whole source is covered.
 * Record i is extent 2 i + 1. Returns the number of extents. */
static size_t
cover(const ct_zip_index *index, const ct_source *source, void *const *targets,
      ct_extent *extents)
{
    uint64_t at = 0;
    size_t n = 0;
    for (size_t i = 0; i < index->n; i++) {
        const ct_zip_entry *e = &index->entries[i];
        extents[n++] = (ct_extent){.offset = at, .n = e->offset - at};
        extents[n++] = (ct_extent){.offset = e->offset,
                                   .n = e->bytes,
                                   .target = targets == NULL ? NULL : targets[i]};
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
        /* Extents alternate: bytes between records, then a record. */
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
