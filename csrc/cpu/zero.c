/* Zeros on the CPU. Mirrors cuda/zero.cu. memset picks its own instruction set. */
#include "cpu/partition.h"
#include "cpu/kernels.h"

#include <string.h>

static void
zero(const void *spans, const ct_piece *piece)
{
    const ct_span *span = (const ct_span *)spans + piece->span;
    const size_t size = ct_dtype_size(span->dtype);
    memset((char *)span->data + piece->offset * size, 0, piece->n * size);
}

ct_status
ct_cpu_zero(void *stream, const ct_span *spans, size_t n_spans, ct_error *err)
{
    (void)stream;
    (void)err;
    if (n_spans != 0) {
        ct_for_pieces(&spans[0].n, sizeof spans[0], n_spans, zero, spans);
    }
    return CT_OK;
}
