/* Writing; reading is in core/checkpoint/zip_read.c. */
#include "core/checkpoint/zip.h"

#include "core/checkpoint/zip_format.h"

#include <string.h>

enum {
    ALIGNMENT = 64,
    EXTRA64_BYTES = 20, /* id, length, two sizes */
    EXTRA_HEADER_BYTES = 4
};

/* Fields appended one after the other; the first failure sticks, the rest do nothing.
 */
typedef struct fields {
    ct_buf *buf;
    ct_error *err;
    ct_status status;
} fields;

static void
put16(fields *f, uint64_t value)
{
    if (f->status == CT_OK) {
        f->status = ct_buf_le16(f->buf, (uint16_t)value, f->err);
    }
}

static void
put32(fields *f, uint64_t value)
{
    if (f->status == CT_OK) {
        f->status = ct_buf_le32(f->buf, (uint32_t)value, f->err);
    }
}

static void
put64(fields *f, uint64_t value)
{
    if (f->status == CT_OK) {
        f->status = ct_buf_le64(f->buf, value, f->err);
    }
}

static void
put_name(fields *f, const char *name)
{
    if (f->status == CT_OK) {
        f->status = ct_buf_text(f->buf, name, f->err);
    }
}

static uint64_t
or_max32(uint64_t value)
{
    return value < ZIP_MAX32 ? value : ZIP_MAX32;
}

/* The fields that a local and a central header share, from the version needed to the
 * length of the name. The checksum is patched later. */
static void
put_common(fields *f, const ct_zip_record *record, bool wide)
{
    put16(f, wide ? ZIP_VERSION64 : ZIP_VERSION);
    put16(f, ZIP_UTF8);
    put16(f, 0); /* stored */
    put16(f, 0); /* midnight */
    put16(f, ZIP_DATE);
    put32(f, 0);
    put32(f, or_max32(record->bytes));
    put32(f, or_max32(record->bytes));
    put16(f, strlen(record->name));
}

/* Extra bytes that make the data of a record whose header starts at `at` aligned. */
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
               : ct_plan_add_data(plan, record->data, record->bytes, err);
}

static ct_status
add_local(ct_plan *plan, const ct_zip_record *record, ct_error *err)
{
    ct_buf buf = {0};
    fields f = {.buf = &buf, .err = err, .status = CT_OK};
    bool wide = record->bytes >= ZIP_MAX32;
    size_t pad = padding_at(plan->bytes, record, wide);
    put32(&f, ZIP_LOCAL_SIGNATURE);
    put_common(&f, record, wide);
    put16(&f, (wide ? EXTRA64_BYTES : 0u) + EXTRA_HEADER_BYTES + pad);
    put_name(&f, record->name);
    if (wide) {
        put16(&f, ZIP_EXTRA64);
        put16(&f, EXTRA64_BYTES - EXTRA_HEADER_BYTES);
        put64(&f, record->bytes);
        put64(&f, record->bytes);
    }
    put16(&f, ZIP_EXTRA_PAD);
    put16(&f, pad);
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

static void
put_central(fields *f, const ct_zip_record *record, uint64_t at)
{
    bool wide_size = record->bytes >= ZIP_MAX32, wide_at = at >= ZIP_MAX32;
    uint64_t extra = (wide_size ? 16u : 0u) + (wide_at ? 8u : 0u);
    put32(f, ZIP_CENTRAL_SIGNATURE);
    put16(f, ZIP_VERSION64); /* made by */
    put_common(f, record, wide_size || wide_at);
    put16(f, extra > 0 ? extra + EXTRA_HEADER_BYTES : 0);
    put16(f, 0); /* comment */
    put16(f, 0); /* disk */
    put16(f, 0); /* internal attributes */
    put32(f, 0); /* external attributes */
    put32(f, or_max32(at));
    put_name(f, record->name);
    if (extra > 0) {
        put16(f, ZIP_EXTRA64);
        put16(f, extra);
    }
    if (wide_size) {
        put64(f, record->bytes);
        put64(f, record->bytes);
    }
    if (wide_at) {
        put64(f, at);
    }
}

static void
put_end(fields *f, uint64_t n, uint64_t directory, uint64_t bytes)
{
    if (n >= ZIP_MAX16 || directory >= ZIP_MAX32 || bytes >= ZIP_MAX32) {
        put32(f, ZIP_END64_SIGNATURE);
        put64(f, ZIP_END64_BYTES - 12); /* of what follows */
        put16(f, ZIP_VERSION64);
        put16(f, ZIP_VERSION64);
        put32(f, 0);
        put32(f, 0);
        put64(f, n);
        put64(f, n);
        put64(f, bytes);
        put64(f, directory);
        put32(f, ZIP_LOCATOR64_SIGNATURE);
        put32(f, 0);
        put64(f, directory + bytes);
        put32(f, 1);
    }
    put32(f, ZIP_END_SIGNATURE);
    put16(f, 0);
    put16(f, 0);
    put16(f, n < ZIP_MAX16 ? n : ZIP_MAX16);
    put16(f, n < ZIP_MAX16 ? n : ZIP_MAX16);
    put32(f, or_max32(bytes));
    put32(f, or_max32(directory));
    put16(f, 0);
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
        status = strlen(records[i].name) >= ZIP_MAX16 / 2
                     ? ct_fail(err, CT_EINVAL, "a record's name is too long")
                     : add_local(plan, &records[i], err);
    }
    return status == CT_OK ? add_directory(plan, records, n, err) : status;
}
