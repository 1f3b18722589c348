/* Spans times a factor, within a limit, on the CPU. Mirrors cuda/scale.cu. */
#include "cpu/partition.h"
#include "cpu/kernels.h"

#include "math/scale.h"

#define CT_BODY "cpu/body/scale.h"
#include "cpu/expand.h"

typedef void scale_body(void *data, size_t from, size_t n, double factor, double limit);

static scale_body *const bodies[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(scale);

typedef struct scale_job {
    const ct_span *spans;
    double factor, limit;
    ct_isa isa;
} scale_job;

static void
scale(const void *arg, const ct_piece *piece)
{
    const scale_job *job = arg;
    const ct_span *span = &job->spans[piece->span];
    bodies[job->isa][span->dtype](span->data, piece->offset, piece->n, job->factor,
                                  job->limit);
}

ct_status
ct_cpu_scale(void *stream, double factor, double limit, const ct_span *spans,
             size_t n_spans, ct_error *err)
{
    (void)stream;
    if (n_spans == 0) {
        return CT_OK;
    }
    scale_job job = {.spans = spans, .factor = factor, .limit = limit};
    ct_status status = ct_isa_get(&job.isa, err);
    for (size_t i = 0; status == CT_OK && i < n_spans; i++) {
        status = ct_check_float("scale", i, spans[i].dtype, err);
    }
    if (status == CT_OK) {
        ct_for_pieces(&spans[0].n, sizeof spans[0], n_spans, scale, &job);
    }
    return status;
}
