/* Copies and conversions on the CPU. Mirrors cuda/copy.cu.
 *
 * A conversion goes through a tile of floats, exact for every bf16 or fp16 value, or
 * doubles if either side is F64: two small loops for each dtype instead of a loop for
 * each pair of dtypes. */
#include "cpu/partition.h"
#include "cpu/kernels.h"
#include "cpu/tile.h"

#include <string.h>

typedef struct copy_job {
    const ct_span *to;
    const ct_span *from;
    ct_isa isa;
} copy_job;

static void
convert(const copy_job *job, const ct_piece *piece)
{
    const ct_span *to = &job->to[piece->span];
    const ct_span *from = &job->from[piece->span];
    const bool wide = to->dtype == CT_F64 || from->dtype == CT_F64;
    ct_tile t;
    for (size_t done = 0; done < piece->n; done += CT_TILE) {
        const size_t at = piece->offset + done;
        const size_t n = piece->n - done < CT_TILE ? piece->n - done : CT_TILE;
        ct_tile_load(job->isa, &t, wide, from->dtype, from->data, at, n);
        ct_tile_store(job->isa, &t, wide, to->dtype, to->data, at, n);
    }
}

static void
copy(const void *arg, const ct_piece *piece)
{
    const copy_job *job = arg;
    const ct_span *to = &job->to[piece->span];
    const ct_span *from = &job->from[piece->span];
    if (to->dtype != from->dtype) {
        convert(job, piece);
        return;
    }
    const size_t size = ct_dtype_size(to->dtype);
    memcpy((char *)to->data + piece->offset * size,
           (const char *)from->data + piece->offset * size, piece->n * size);
}

static ct_status
check_pair(size_t i, const ct_span *to, const ct_span *from, ct_error *err)
{
    if (to->n != from->n) {
        return ct_fail(err, CT_EINVAL,
                       "copy: span %zu has %zu elements to fill from %zu", i, to->n,
                       from->n);
    }
    if (to->dtype == from->dtype) {
        return CT_OK;
    }
    ct_status status = ct_check_float("copy", i, to->dtype, err);
    return status == CT_OK ? ct_check_float("copy", i, from->dtype, err) : status;
}

ct_status
ct_cpu_copy(void *stream, const ct_span *to, const ct_span *from, size_t n_spans,
            ct_error *err)
{
    (void)stream;
    if (n_spans == 0) {
        return CT_OK;
    }
    copy_job job = {.to = to, .from = from};
    ct_status status = ct_isa_get(&job.isa, err);
    for (size_t i = 0; status == CT_OK && i < n_spans; i++) {
        status = check_pair(i, &to[i], &from[i], err);
    }
    if (status == CT_OK) {
        ct_for_pieces(&to[0].n, sizeof to[0], n_spans, copy, &job);
    }
    return status;
}
