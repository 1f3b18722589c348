/* A growing byte buffer: integers, text and JSON strings.
 *
 * Headers of archives and manifests are built here piece by piece. An append that fails
 * leaves the earlier content intact, so that callers release the buffer on success and
 * on failure alike. Numbers of file formats are stored byte by byte: the formats are
 * little-endian whatever the host, and places in a header have no alignment. */
#include "core/base/buf.h"

#include "core/base/alloc.h"

#include <stdio.h>
#include <string.h>

void
ct_buf_fini(ct_buf *buf)
{
    ct_free(buf->data);
    *buf = (ct_buf){0};
}

/* The comparison comes before the sum: a sum that wraps around would reserve a small
 * block. */
static ct_status
reserve(ct_buf *buf, size_t more, ct_error *err)
{
    void *block = buf->data;
    if (more > SIZE_MAX - buf->n) {
        return ct_fail(err, CT_ENOMEM, "a buffer cannot grow by %zu bytes", more);
    }
    ct_status status = ct_grow(&block, &buf->capacity, buf->n + more, 1, err);
    buf->data = block;
    return status;
}

/* Nothing is reserved for no bytes, as memcpy forbids NULL even then. */
ct_status
ct_buf_add(ct_buf *buf, const void *data, size_t n, ct_error *err)
{
    if (n == 0) {
        return CT_OK;
    }
    ct_status status = reserve(buf, n, err);
    if (status == CT_OK) {
        memcpy(buf->data + buf->n, data, n);
        buf->n += n;
    }
    return status;
}

ct_status
ct_buf_fill(ct_buf *buf, unsigned char byte, size_t n, ct_error *err)
{
    if (n == 0) {
        return CT_OK;
    }
    ct_status status = reserve(buf, n, err);
    if (status == CT_OK) {
        memset(buf->data + buf->n, byte, n);
        buf->n += n;
    }
    return status;
}

ct_status
ct_buf_text(ct_buf *buf, const char *text, ct_error *err)
{
    return ct_buf_add(buf, text, strlen(text), err);
}

ct_status
ct_buf_u64(ct_buf *buf, uint64_t value, ct_error *err)
{
    /* 2^64 - 1 has 20 digits. */
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%llu", (unsigned long long)value);
    return ct_buf_add(buf, digits, (size_t)n, err);
}

/* The escape of a byte in a JSON string; NULL: none is needed. Bytes from 0x80 on are
 * parts of UTF-8 sequences, unescaped in JSON (RFC 8259, section 7). */
static const char *
escape_of(unsigned char byte, char scratch[8])
{
    switch (byte) {
    case '"':
        return "\\\"";
    case '\\':
        return "\\\\";
    case '\n':
        return "\\n";
    case '\r':
        return "\\r";
    case '\t':
        return "\\t";
    default:
        break;
    }
    if (byte >= 0x20) {
        return NULL;
    }
    (void)snprintf(scratch, 8, "\\u%04x", byte);
    return scratch;
}

ct_status
ct_buf_json(ct_buf *buf, const char *text, size_t n, ct_error *err)
{
    size_t before = buf->n;
    ct_status status = ct_buf_add(buf, "\"", 1, err);
    for (size_t i = 0; i < n && status == CT_OK; i++) {
        char scratch[8];
        const char *escape = escape_of((unsigned char)text[i], scratch);
        status = escape != NULL ? ct_buf_text(buf, escape, err)
                                : ct_buf_add(buf, text + i, 1, err);
    }
    if (status == CT_OK) {
        status = ct_buf_add(buf, "\"", 1, err);
    }
    if (status != CT_OK) {
        /* Half a string would make the whole document invalid. */
        buf->n = before;
    }
    return status;
}

void
ct_store_le32(unsigned char *at, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        at[i] = (unsigned char)(value >> (8 * i));
    }
}

void
ct_store_le64(unsigned char *at, uint64_t value)
{
    ct_store_le32(at, (uint32_t)value);
    ct_store_le32(at + 4, (uint32_t)(value >> 32));
}

ct_status
ct_buf_le64(ct_buf *buf, uint64_t value, ct_error *err)
{
    unsigned char bytes[8];
    ct_store_le64(bytes, value);
    return ct_buf_add(buf, bytes, sizeof bytes, err);
}

uint16_t
ct_load_le16(const unsigned char *at)
{
    return (uint16_t)(at[0] | at[1] << 8);
}

uint32_t
ct_load_le32(const unsigned char *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
           (uint32_t)at[3] << 24;
}

uint64_t
ct_load_le64(const unsigned char *at)
{
    return (uint64_t)ct_load_le32(at) | (uint64_t)ct_load_le32(at + 4) << 32;
}
