/* Element types, and their names in torch, NumPy and safetensors. */
#ifndef CT_DTYPE_H
#define CT_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif

#endif
