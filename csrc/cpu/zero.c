/* Zeros on the CPU. Mirrors cuda/zero.cu. memset picks its own instruction set. */
#include "cpu/partition.h"
#include "cpu/kernels.h"

#include "core/base/pool.h"

#include <string.h>

typedef struct zero_job {
    const ct_span *spans;
    const ct_partition *partition;
} zero_job;

static void
run_batch(void *arg, size_t batch)
{
    const zero_job *job = arg;
    ct_piece piece = ct_partition_start(job->partition, batch);
    while (ct_partition_next(job->partition, batch, &piece)) {
        const ct_span *span = &job->spans[piece.span];
        const size_t size = ct_dtype_size(span->dtype);
        memset((char *)span->data + piece.offset * size, 0, piece.n * size);
    }
}

ct_status
ct_cpu_zero(void *stream, const ct_span *spans, size_t n_spans, ct_error *err)
{
    (void)stream;
    (void)err;
    if (n_spans != 0) {
        ct_partition partition;
        zero_job job = {.spans = spans, .partition = &partition};
        ct_partition_init(&partition, &spans[0].n, sizeof spans[0], n_spans);
        ct_pool_run(run_batch, &job, partition.n_batches);
    }
    return CT_OK;
}
