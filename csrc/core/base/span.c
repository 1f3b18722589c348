/* The table of dtypes: sizes, and the names of torch, NumPy and safetensors. */
#include "core/base/span.h"

typedef struct dtype_info {
    const char *name;
    const char *tag;
    size_t size;
    bool is_float;
} dtype_info;

static const dtype_info infos[CT_DTYPE_COUNT] = {
    [CT_F32] = {"float32",  "F32",  4, true },
      [CT_F64] = {"float64",  "F64",  8, true },
    [CT_BF16] = {"bfloat16", "BF16", 2, true },
      [CT_F16] = {"float16",  "F16",  2, true },
    [CT_I64] = {"int64",    "I64",  8, false},
      [CT_I32] = {"int32",    "I32",  4, false},
    [CT_I16] = {"int16",    "I16",  2, false},
      [CT_I8] = {"int8",     "I8",   1, false},
    [CT_U8] = {"uint8",    "U8",   1, false},
      [CT_BOOL] = {"bool",     "BOOL", 1, false},
};

size_t
ct_dtype_size(ct_dtype dtype)
{
    return infos[dtype].size;
}

ct_span
ct_span_part(ct_span whole, size_t at, size_t n)
{
    whole.data = (char *)whole.data + at * ct_dtype_size(whole.dtype);
    whole.n = n;
    return whole;
}

const char *
ct_dtype_name(ct_dtype dtype)
{
    return infos[dtype].name;
}

const char *
ct_dtype_tag(ct_dtype dtype)
{
    return infos[dtype].tag;
}

bool
ct_dtype_is_float(ct_dtype dtype)
{
    return infos[dtype].is_float;
}
