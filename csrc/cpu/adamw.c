/* AdamW on the CPU. Mirrors cuda/adamw.cu. */
#include "cpu/cuts.h"
#include "cpu/kernels.h"

#include "core/ct_pool.h"

#define CT_BODY "cpu/adamw_body.h"
#include "cpu/expand.h"

typedef void adamw_body(const ct_adamw_coef *coef, const ct_adamw_span *span,
                        size_t from, size_t n, bool zero_grads);

static adamw_body *const bodies[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(adamw);

typedef struct adamw_job {
    const ct_adamw_coef *coefs;
    const ct_adamw_span *spans;
    bool zero_grads;
    ct_isa isa;
    const ct_cuts *cuts;
} adamw_job;

static void
run_batch(void *arg, size_t batch)
{
    const adamw_job *job = arg;
    ct_piece piece = ct_cuts_start(job->cuts, batch);
    while (ct_cuts_next(job->cuts, batch, &piece)) {
        const ct_adamw_span *span = &job->spans[piece.span];
        bodies[job->isa][span->dtype](&job->coefs[span->coef], span, piece.offset,
                                      piece.n, job->zero_grads);
    }
}

ct_status
ct_cpu_adamw(void *stream, const ct_adamw_coef *coefs, const ct_adamw_span *spans,
             size_t n_spans, bool zero_grads, ct_error *err)
{
    (void)stream; /* the CPU is done when the call returns */
    if (n_spans == 0) {
        return CT_OK;
    }
    ct_cuts cuts;
    adamw_job job = {
        .coefs = coefs, .spans = spans, .zero_grads = zero_grads, .cuts = &cuts};
    ct_status status = ct_isa_get(&job.isa, err);
    for (size_t i = 0; status == CT_OK && i < n_spans; i++) {
        status = ct_check_float("adamw", i, spans[i].dtype, err);
    }
    if (status == CT_OK) {
        ct_cuts_init(&cuts, &spans[0].n, sizeof spans[0], n_spans);
        ct_pool_run(run_batch, &job, cuts.n_batches);
    }
    return status;
}
