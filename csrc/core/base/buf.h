/* A growing byte buffer, for building headers and manifests. */
#ifndef CT_BUF_H
#define CT_BUF_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

/* Starts as {0}. */
typedef struct ct_buf {
    unsigned char *data;
    size_t n;        /* bytes in use */
    size_t capacity; /* bytes allocated; >= n */
} ct_buf;

void ct_buf_fini(ct_buf *buf);

/* Each appends; CT_ENOMEM leaves the buffer unchanged. */
CT_NODISCARD ct_status ct_buf_add(ct_buf *buf, const void *data, size_t n,
                                  ct_error *err);
CT_NODISCARD ct_status ct_buf_fill(ct_buf *buf, unsigned char byte, size_t n,
                                   ct_error *err);
CT_NODISCARD ct_status ct_buf_text(ct_buf *buf, const char *text, ct_error *err);
CT_NODISCARD ct_status ct_buf_u64(ct_buf *buf, uint64_t value, ct_error *err);

/* text[0..n), UTF-8, as a JSON string with its quotes. */
CT_NODISCARD ct_status ct_buf_json(ct_buf *buf, const char *text, size_t n,
                                   ct_error *err);

/* Little-endian, as in file formats. */
CT_NODISCARD ct_status ct_buf_le64(ct_buf *buf, uint64_t value, ct_error *err);
void ct_store_le32(unsigned char *at, uint32_t value);
void ct_store_le64(unsigned char *at, uint64_t value);
uint16_t ct_load_le16(const unsigned char *at);
uint32_t ct_load_le32(const unsigned char *at);
uint64_t ct_load_le64(const unsigned char *at);

CT_END_DECLS

#endif
