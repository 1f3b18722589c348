/* SGD on the CPU. Mirrors cuda/sgd.cu. */
#include "cpu/cuts.h"
#include "cpu/kernels.h"

#include "core/ct_pool.h"

#define CT_BODY "cpu/sgd_body.h"
#include "cpu/expand.h"

typedef void sgd_body(const ct_sgd_coef *coef, const ct_sgd_span *span, size_t from,
                      size_t n, bool zero_grads);

static sgd_body *const plain[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(sgd_plain);
static sgd_body *const with_momentum[CT_ISA_COUNT][CT_FLOAT_DTYPES] =
    CT_BODIES(sgd_momentum);

typedef struct sgd_job {
    const ct_sgd_coef *coefs;
    const ct_sgd_span *spans;
    bool zero_grads;
    ct_isa isa;
    const ct_cuts *cuts;
} sgd_job;

static void
run_batch(void *arg, size_t batch)
{
    const sgd_job *job = arg;
    ct_piece piece = ct_cuts_start(job->cuts, batch);
    while (ct_cuts_next(job->cuts, batch, &piece)) {
        const ct_sgd_span *span = &job->spans[piece.span];
        sgd_body *body = span->momentum == NULL ? plain[job->isa][span->dtype]
                                                : with_momentum[job->isa][span->dtype];
        body(&job->coefs[span->coef], span, piece.offset, piece.n, job->zero_grads);
    }
}

ct_status
ct_cpu_sgd(void *stream, const ct_sgd_coef *coefs, const ct_sgd_span *spans,
           size_t n_spans, bool zero_grads, ct_error *err)
{
    (void)stream;
    if (n_spans == 0) {
        return CT_OK;
    }
    ct_cuts cuts;
    sgd_job job = {
        .coefs = coefs, .spans = spans, .zero_grads = zero_grads, .cuts = &cuts};
    ct_status status = ct_isa_get(&job.isa, err);
    for (size_t i = 0; status == CT_OK && i < n_spans; i++) {
        status = ct_check_float("sgd", i, spans[i].dtype, err);
    }
    if (status == CT_OK) {
        ct_cuts_init(&cuts, &spans[0].n, sizeof spans[0], n_spans);
        ct_pool_run(run_batch, &job, cuts.n_batches);
    }
    return status;
}
