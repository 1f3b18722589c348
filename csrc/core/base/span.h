/* A span: contiguous elements of one dtype in one device's memory.
 *
 * Kernels and collectives work on lists of spans. A span owns nothing: whoever fills
 * it keeps the memory alive until the work on it has ended (on a GPU, until the
 * stream has drained). A flat buffer is a list of one span. */
#ifndef CT_SPAN_H
#define CT_SPAN_H

#include "core/base/dtype.h"

#include <stddef.h>

typedef struct ct_span {
    void *data;
    size_t n; /* elements */
    ct_dtype dtype;
} ct_span;

#ifdef __cplusplus
extern "C" {
#endif

/* Elements [at, at + n) of a span, which has them. */
ct_span ct_span_part(ct_span whole, size_t at, size_t n);

#ifdef __cplusplus
}
#endif

#endif
