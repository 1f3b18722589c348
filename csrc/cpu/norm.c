/* Sums of powers on the CPU. Mirrors cuda/norm.cu.
 *
 * Element k of a piece is added to lane k % LANES; the lanes of a batch are folded in
 * index order, then the batches: the compiler may vectorise the lanes, and neither the
 * vector length nor the number of threads changes a bit. For separate sums of spans
 * each piece has lanes, and the pieces of a span are folded in order. */

#include "cpu/kernels.h"

#include "core/base/pool.h"

enum {
    LANES = 32
};

#define CT_BODY "cpu/body/norm.h"
#include "cpu/expand.h"

typedef void norm_body(ct_norm_kind kind, double p, const void *data, size_t from,
                       size_t n, double *lanes);

static norm_body *const bodies[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(norms);

typedef struct norm_job {
    const ct_span *spans;
    ct_norm_kind kind;
    double p;
    ct_isa isa;
    const ct_partition *partition;
    double *partial; /* for each batch, or for each piece */
} norm_job;

static void
add_piece(const norm_job *job, const ct_piece *piece, double *lanes)
{
    const ct_span *span = &job->spans[piece->span];
    bodies[job->isa][span->dtype](job->kind, job->p, span->data, piece->offset,
                                  piece->n, lanes);
}

static double
fold(const norm_job *job, const double *lanes)
{
    double sum = 0.0;
    for (size_t k = 0; k < LANES; k++) {
        sum = ct_norm_merge(job->kind, sum, lanes[k]);
    }
    return sum;
}

static ct_status
job_init(norm_job *job, double p, const ct_span *spans, size_t n_spans, ct_error *err)
{
    *job = (norm_job){.spans = spans, .kind = ct_norm_kind_of(p), .p = p};
    ct_status status = ct_isa_get(&job->isa, err);
    return status == CT_OK ? ct_check_floats("norm", spans, n_spans, err) : status;
}

/* ---- all spans together ---------------------------------------------------------- */

static void
run_batch(void *arg, size_t batch)
{
    const norm_job *job = arg;
    double lanes[LANES] = {0.0};
    ct_piece piece = ct_partition_start(job->partition, batch);
    while (ct_partition_next(job->partition, batch, &piece)) {
        add_piece(job, &piece, lanes);
    }
    job->partial[batch] = fold(job, lanes);
}

ct_status
ct_cpu_norm(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
            size_t n_spans, double *sum, ct_error *err)
{
    (void)stream;
    (void)scratch; /* the partial sums fit on the stack */
    ct_partition partition;
    double partial[CT_PARTITION_MAX];
    norm_job job;
    ct_status status = job_init(&job, p, spans, n_spans, err);
    if (status != CT_OK) {
        return status;
    }
    double total = 0.0;
    if (n_spans != 0) {
        job.partition = &partition;
        job.partial = partial;
        ct_partition_init(&partition, &spans[0].n, sizeof spans[0], n_spans);
        ct_pool_run(run_batch, &job, partition.n_batches);
        for (size_t b = 0; b < partition.n_batches; b++) {
            total = ct_norm_merge(job.kind, total, partial[b]);
        }
    }
    *sum = total;
    return CT_OK;
}

ct_status
ct_cpu_clip(void *stream, ct_scratch *scratch, const ct_clip_request *request,
            const ct_span *spans, size_t n_spans, ct_clip_outcome *outcome,
            ct_error *err)
{
    double sum;
    ct_status status =
        ct_cpu_norm(stream, scratch, request->norm_type, spans, n_spans, &sum, err);
    if (status == CT_OK) {
        status = ct_cpu_decide(stream, request, &sum, &sum, outcome, err);
    }
    return status;
}

ct_status
ct_cpu_decide(void *stream, const ct_clip_request *request, const double *sum,
              const double *all, ct_clip_outcome *outcome, ct_error *err)
{
    const ct_norm_kind kind = ct_norm_kind_of(request->norm_type);
    (void)stream;
    (void)err;
    ct_clip_decide_outcome(request, kind, *sum, *all, outcome);
    return CT_OK;
}

/* ---- each span by itself --------------------------------------------------------- */

static void
run_piece(const void *arg, const ct_piece *piece)
{
    const norm_job *job = arg;
    double lanes[LANES] = {0.0};
    add_piece(job, piece, lanes);
    job->partial[piece->number] = fold(job, lanes);
}

ct_status
ct_cpu_norms(void *stream, ct_scratch *scratch, double p, const ct_span *spans,
             size_t n_spans, double *sums, ct_error *err)
{
    (void)stream;
    ct_partition partition;
    norm_job job;
    ct_status status = job_init(&job, p, spans, n_spans, err);
    if (status != CT_OK || n_spans == 0) {
        return status;
    }
    ct_partition_init(&partition, &spans[0].n, sizeof spans[0], n_spans);
    status = ct_cpu_scratch_grow(scratch,
                                 (n_spans + partition.n_batches) * sizeof(double), err);
    if (status == CT_OK) {
        job.partial = scratch->data;
        ct_partition_run(&partition, run_piece, &job);
        ct_partition_fold(&partition, job.partial, 1, n_spans, job.kind, sums);
    }
    return status;
}
