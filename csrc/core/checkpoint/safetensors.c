/* Writing: sort, header, pieces. Reading is in core/checkpoint/safetensors_read.c and
 * core/checkpoint/safetensors_data.c. */
#include "core/checkpoint/safetensors.h"

#include "core/base/crc32c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In the library's order: tensors with a later dtype come first in a file, so that
 * every one is aligned to its element. */
static const struct {
    const char *tag;
    size_t bytes;
} dtypes[] = {
    {"BOOL",    1},
    {"U8",      1},
    {"I8",      1},
    {"F8_E5M2", 1},
    {"F8_E4M3", 1},
    {"F8_E8M0", 1},
    {"I16",     2},
    {"U16",     2},
    {"F16",     2},
    {"BF16",    2},
    {"I32",     4},
    {"U32",     4},
    {"F32",     4},
    {"C64",     8},
    {"F64",     8},
    {"I64",     8},
    {"U64",     8},
};

enum {
    DTYPE_COUNT = sizeof dtypes / sizeof dtypes[0],
    HEADER_ALIGNMENT = 8
};

static size_t
dtype_of(ct_text tag)
{
    size_t i = 0;
    while (i < DTYPE_COUNT && !ct_text_is(tag, dtypes[i].tag)) {
        i++;
    }
    return i;
}

size_t
ct_st_tag_bytes(ct_text tag)
{
    size_t i = dtype_of(tag);
    return i < DTYPE_COUNT ? dtypes[i].bytes : 0;
}

static ct_text
text_of(const char *tag)
{
    return (ct_text){.data = tag, .n = strlen(tag)};
}

static int
compare_entries(const void *left, const void *right)
{
    const ct_st_entry *a = left, *b = right;
    size_t i = dtype_of(text_of(a->tag)), k = dtype_of(text_of(b->tag));
    return i != k ? (i < k) - (i > k) : ct_text_compare(a->name, b->name);
}

static ct_status
check_entry(const ct_st_entry *entry, ct_error *err)
{
    const char *name = entry->name.data;
    int n = (int)(entry->name.n < 200 ? entry->name.n : 200);
    size_t bytes = ct_st_tag_bytes(text_of(entry->tag));
    if (bytes == 0) {
        return ct_fail(err, CT_EINVAL, "tensor '%.*s': safetensors has no dtype '%s'",
                       n, name, entry->tag);
    }
    if (ct_text_is(entry->name, "__metadata__")) {
        return ct_fail(err, CT_EINVAL, "a tensor cannot be called '__metadata__'");
    }
    for (size_t i = 0; i < entry->ndim; i++) {
        bytes *= (size_t)entry->shape[i];
    }
    if (bytes != entry->bytes) {
        return ct_fail(err, CT_EINVAL,
                       "tensor '%.*s': %zu bytes of data where its shape and dtype "
                       "need %zu",
                       n, name, entry->bytes, bytes);
    }
    return CT_OK;
}

static ct_status
add_pair(ct_buf *buf, ct_text key, ct_text value, ct_error *err)
{
    ct_status status = ct_buf_json(buf, key.data, key.n, err);
    if (status == CT_OK) {
        status = ct_buf_text(buf, ":", err);
    }
    return status == CT_OK ? ct_buf_json(buf, value.data, value.n, err) : status;
}

/* crc_at: where the digits of the checksums of data and header go. */
static ct_status
add_metadata(ct_buf *buf, const ct_st_pair *pairs, size_t n, size_t *crc_at,
             ct_error *err)
{
    ct_status status = ct_buf_text(buf, "{\"__metadata__\":{", err);
    for (size_t i = 0; i < n && status == CT_OK; i++) {
        if (ct_text_is(pairs[i].key, CT_ST_CRC_KEY) ||
            ct_text_is(pairs[i].key, CT_ST_HEADER_KEY)) {
            continue; /* of the file that the metadata was read from */
        }
        status = add_pair(buf, pairs[i].key, pairs[i].value, err);
        if (status == CT_OK) {
            status = ct_buf_text(buf, ",", err);
        }
    }
    if (status == CT_OK) {
        status = ct_buf_text(buf, "\"" CT_ST_CRC_KEY "\":\"", err);
    }
    crc_at[0] = buf->n;
    if (status == CT_OK) {
        status = ct_buf_text(buf, "00000000\",\"" CT_ST_HEADER_KEY "\":\"", err);
    }
    crc_at[1] = buf->n;
    return status == CT_OK ? ct_buf_text(buf, "00000000\"}", err) : status;
}

static ct_status
add_shape(ct_buf *buf, const ct_st_entry *entry, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; i < entry->ndim && status == CT_OK; i++) {
        status = i > 0 ? ct_buf_text(buf, ",", err) : CT_OK;
        if (status == CT_OK) {
            status = ct_buf_u64(buf, entry->shape[i], err);
        }
    }
    return status;
}

static ct_status
add_tensor(ct_buf *buf, const ct_st_entry *entry, uint64_t offset, ct_error *err)
{
    ct_status status = ct_buf_text(buf, ",", err);
    const char *const parts[] = {":{\"dtype\":\"", entry->tag, "\",\"shape\":["};
    if (status == CT_OK) {
        status = ct_buf_json(buf, entry->name.data, entry->name.n, err);
    }
    for (size_t i = 0; i < 3 && status == CT_OK; i++) {
        status = ct_buf_text(buf, parts[i], err);
    }
    if (status == CT_OK) {
        status = add_shape(buf, entry, err);
    }
    if (status == CT_OK) {
        status = ct_buf_text(buf, "],\"data_offsets\":[", err);
    }
    if (status == CT_OK) {
        status = ct_buf_u64(buf, offset, err);
    }
    if (status == CT_OK) {
        status = ct_buf_text(buf, ",", err);
    }
    if (status == CT_OK) {
        status = ct_buf_u64(buf, offset + entry->bytes, err);
    }
    return status == CT_OK ? ct_buf_text(buf, "]}", err) : status;
}

static ct_status
build_header(ct_buf *buf, const ct_st_entry *entries, size_t n,
             const ct_st_pair *metadata, size_t n_metadata, size_t *crc_at,
             ct_error *err)
{
    uint64_t offset = 0;
    ct_status status = ct_buf_le64(buf, 0, err); /* its length, known at the end */
    if (status == CT_OK) {
        status = add_metadata(buf, metadata, n_metadata, crc_at, err);
    }
    for (size_t i = 0; i < n && status == CT_OK; i++) {
        status = add_tensor(buf, &entries[i], offset, err);
        offset += entries[i].bytes;
    }
    if (status == CT_OK) {
        status = ct_buf_text(buf, "}", err);
    }
    size_t pad = (HEADER_ALIGNMENT - buf->n % HEADER_ALIGNMENT) % HEADER_ALIGNMENT;
    if (status == CT_OK && pad > 0) {
        status = ct_buf_fill(buf, ' ', pad, err);
    }
    if (status == CT_OK) {
        ct_store_le64(buf->data, buf->n - 8);
        char digits[CT_ST_CRC_DIGITS + 1];
        (void)snprintf(digits, sizeof digits, "%08x", ct_crc32c(0, buf->data, buf->n));
        memcpy(buf->data + crc_at[1], digits, CT_ST_CRC_DIGITS);
    }
    return status;
}

static ct_status
add_data(ct_plan *plan, const ct_st_entry *entry, ct_error *err)
{
    return entry->n_excerpts > 0
               ? ct_plan_add_excerpts(plan, entry->excerpts, entry->n_excerpts, err)
               : ct_plan_add_data(plan, entry->data, entry->bytes, err);
}

ct_status
ct_st_plan(ct_plan *plan, ct_st_entry *entries, size_t n, const ct_st_pair *metadata,
           size_t n_metadata, ct_error *err)
{
    ct_buf header = {0};
    size_t crc_at[2] = {0, 0};
    ct_status status = CT_OK;
    for (size_t i = 0; i < n && status == CT_OK; i++) {
        status = check_entry(&entries[i], err);
    }
    if (status == CT_OK) {
        if (n > 0) {
            qsort(entries, n, sizeof *entries, compare_entries);
        }
        status = build_header(&header, entries, n, metadata, n_metadata, crc_at, err);
    }
    if (status == CT_OK) {
        status = ct_plan_add_buf(plan, &header, err);
    }
    for (size_t i = 0; i < n && status == CT_OK; i++) {
        status = add_data(plan, &entries[i], err);
    }
    if (status == CT_OK) {
        ct_patch patch = {CT_PATCH_CRC32C_HEX, .first = 1, .n = n, .offset = crc_at[0]};
        status = ct_plan_add_patch(plan, patch, err);
    }
    ct_buf_fini(&header);
    return status;
}
