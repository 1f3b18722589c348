#include "core/base/span.h"

ct_span
ct_span_part(ct_span whole, size_t at, size_t n)
{
    whole.data = (char *)whole.data + at * ct_dtype_size(whole.dtype);
    whole.n = n;
    return whole;
}
