/* Matrix product on the CPU, in tiles of the result. Mirrors cuda/gemm.cu.
 *
 * For processes without a BLAS; a tile of the result, the packed
 * blocks of both factors and their sums stay in the first two levels of cache. */
#include "cpu/blas.h"
#include "cpu/gemm_bf16.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"

#include "core/ct_pool.h"

#include <stdint.h>
#include <string.h>

enum {
    TILE = 64,
    DEPTH = 128,
    STRIP = 32
};

#define CT_BODY "cpu/gemm_body.h"
#define CT_ONLY_F32_F64
#include "cpu/expand.h"

typedef void gemm_body(const ct_gemm *gemm, size_t row0, size_t col0);

static gemm_body *const bodies[CT_ISA_COUNT][CT_F64 + 1] = CT_REAL_BODIES(gemm);

typedef struct gemm_job {
    const ct_gemm *gemm;
    gemm_body *body;
    size_t tiles_across;
} gemm_job;

static void
run_tile(void *arg, size_t batch)
{
    const gemm_job *job = arg;
    const size_t row = batch / job->tiles_across;
    const size_t col = batch % job->tiles_across;
    job->body(job->gemm, row * TILE, col * TILE);
}

/* A matrix of `rows` rows of `cols` used elements, ld apart. */
static ct_status
check_matrix(const char *name, const void *data, size_t rows, size_t cols, size_t ld,
             ct_error *err)
{
    if (rows != 0 && cols != 0 && data == NULL) {
        return ct_fail(err, CT_EINVAL, "gemm: %s is NULL", name);
    }
    if (rows > 1 && ld < cols) {
        return ct_fail(err, CT_EINVAL, "gemm: ld%s must be >= %zu, got %zu", name, cols,
                       ld);
    }
    return CT_OK;
}

static ct_status
check(const ct_gemm *g, ct_error *err)
{
    if (g->dtype != CT_F32 && g->dtype != CT_F64 && g->dtype != CT_BF16) {
        return ct_fail(err, CT_EINVAL,
                       "gemm: dtype must be float32, float64 or bfloat16, got %s",
                       ct_dtype_name(g->dtype));
    }
    const size_t a_rows = g->trans_a ? g->k : g->m;
    const size_t b_rows = g->trans_b ? g->n : g->k;
    ct_status status =
        check_matrix("a", g->a, a_rows, g->trans_a ? g->m : g->k, g->lda, err);
    if (status == CT_OK) {
        status = check_matrix("b", g->b, b_rows, g->trans_b ? g->k : g->n, g->ldb, err);
    }
    return status == CT_OK ? check_matrix("c", g->c, g->m, g->n, g->ldc, err) : status;
}

void
ct_cpu_gemm_real(ct_isa isa, const ct_gemm *gemm)
{
    if (ct_blas_gemm(gemm)) {
        return;
    }
    gemm_job job = {
        .gemm = gemm,
        .body = bodies[isa][gemm->dtype],
        .tiles_across = (gemm->n - 1) / TILE + 1,
    };
    ct_pool_run(run_tile, &job, job.tiles_across * ((gemm->m - 1) / TILE + 1));
}

ct_status
ct_cpu_gemm(void *stream, ct_scratch *scratch, const ct_gemm *gemm, ct_error *err)
{
    (void)stream;
    ct_isa isa;
    ct_status status = ct_isa_get(&isa, err);
    if (status == CT_OK) {
        status = check(gemm, err);
    }
    if (status != CT_OK || gemm->m == 0 || gemm->n == 0) {
        return status;
    }
    if (gemm->dtype == CT_BF16) {
        return ct_cpu_gemm_bf16(isa, scratch, gemm, err);
    }
    ct_cpu_gemm_real(isa, gemm);
    return CT_OK;
}
