/* A span: contiguous elements of one dtype in one device's memory.
 *
 * Kernels and collectives work on lists of spans. A span owns nothing: its maker keeps
 * the memory alive until the work has ended (on a GPU, until the stream has drained). A
 * flat buffer is a list with a single span. */
#ifndef CORE_BASE_SPAN_H
#define CORE_BASE_SPAN_H

#include "core/base/decls.h"

#include <stdbool.h>
#include <stddef.h>

CT_BEGIN_DECLS

/* Element types, with the names of torch, NumPy and safetensors. */

typedef enum ct_dtype {
    CT_F32 = 0,
    CT_F64,
    CT_BF16,
    CT_F16,
    CT_I64,
    CT_I32,
    CT_I16,
    CT_I8,
    CT_U8,
    CT_BOOL,
    CT_DTYPE_COUNT
} ct_dtype;

size_t ct_dtype_size(ct_dtype dtype);      /* bytes of one element */
const char *ct_dtype_name(ct_dtype dtype); /* "float32", "bfloat16", ... */
const char *ct_dtype_tag(ct_dtype dtype);  /* safetensors' "F32", "BF16", ... */
bool ct_dtype_is_float(ct_dtype dtype);    /* F32, F64, BF16 or F16 */

typedef struct ct_span {
    void *data;
    size_t n; /* elements */
    ct_dtype dtype;
} ct_span;

/* Elements [at, at + n) of a span of at least at + n. */
ct_span ct_span_part(ct_span whole, size_t at, size_t n);

CT_END_DECLS

#endif
