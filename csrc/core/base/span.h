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

/* In the order of ct_dtype: a table that C++ takes too has no designators. */
static const struct {
    const char *name; /* torch's and NumPy's */
    const char *tag;  /* safetensors' */
    size_t size;
    bool is_float;
} ct_dtypes[CT_DTYPE_COUNT] = {
    {"float32",  "F32",  4, true },
    {"float64",  "F64",  8, true },
    {"bfloat16", "BF16", 2, true },
    {"float16",  "F16",  2, true },
    {"int64",    "I64",  8, false},
    {"int32",    "I32",  4, false},
    {"int16",    "I16",  2, false},
    {"int8",     "I8",   1, false},
    {"uint8",    "U8",   1, false},
    {"bool",     "BOOL", 1, false},
};

/* Bytes of one element. */
static inline size_t
ct_dtype_size(ct_dtype dtype)
{
    return ct_dtypes[dtype].size;
}

static inline const char *
ct_dtype_name(ct_dtype dtype)
{
    return ct_dtypes[dtype].name;
}

static inline const char *
ct_dtype_tag(ct_dtype dtype)
{
    return ct_dtypes[dtype].tag;
}

static inline bool
ct_dtype_is_float(ct_dtype dtype)
{
    return ct_dtypes[dtype].is_float;
}

typedef struct ct_span {
    void *data;
    size_t n; /* elements */
    ct_dtype dtype;
} ct_span;

/* Elements [at, at + n) of a span of at least at + n. */
static inline ct_span
ct_span_part(ct_span whole, size_t at, size_t n)
{
    whole.data = (char *)whole.data + at * ct_dtype_size(whole.dtype);
    whole.n = n;
    return whole;
}

CT_END_DECLS

#endif
