/* Without AMX the factors become floats, which hold every one of them exactly, and the
 * product is rounded once, as it is with AMX. */
#include "cpu/gemm_bf16.h"

#include "cpu/amx.h"
#include "cpu/gemm_amx.h"
#include "cpu/tile.h"

#include "core/ct_pool.h"

#include <string.h>

/* A matrix on its way between its dtype and floats without gaps. */
typedef struct rows_job {
    ct_isa isa;
    void *data;
    size_t ld, cols;
    float *floats;
} rows_job;

static void
widen_row(void *arg, size_t row)
{
    const rows_job *job = arg;
    ct_tile tile;
    for (size_t at = 0; at < job->cols; at += CT_TILE) {
        const size_t n = job->cols - at < CT_TILE ? job->cols - at : CT_TILE;
        ct_tile_load(job->isa, &tile, false, CT_BF16, job->data, row * job->ld + at, n);
        memcpy(job->floats + row * job->cols + at, tile.f32, n * sizeof(float));
    }
}

static void
narrow_row(void *arg, size_t row)
{
    const rows_job *job = arg;
    ct_tile tile;
    for (size_t at = 0; at < job->cols; at += CT_TILE) {
        const size_t n = job->cols - at < CT_TILE ? job->cols - at : CT_TILE;
        memcpy(tile.f32, job->floats + row * job->cols + at, n * sizeof(float));
        ct_tile_store(job->isa, &tile, false, CT_BF16, job->data, row * job->ld + at,
                      n);
    }
}

static ct_status
multiply_wide(ct_isa isa, ct_scratch *scratch, const ct_gemm *g, ct_error *err)
{
    const size_t a_rows = g->trans_a ? g->k : g->m, b_rows = g->trans_b ? g->n : g->k;
    ct_gemm wide = *g;
    wide.dtype = CT_F32;
    wide.lda = g->trans_a ? g->m : g->k;
    wide.ldb = g->trans_b ? g->k : g->n;
    wide.ldc = g->n;
    const size_t a_n = a_rows * wide.lda, b_n = b_rows * wide.ldb;
    ct_status status = ct_device_cpu.scratch_grow(
        scratch, (a_n + b_n + g->m * g->n) * sizeof(float), err);
    if (status != CT_OK) {
        return status;
    }
    float *const floats = scratch->data;
    rows_job a = {isa, (void *)g->a, g->lda, wide.lda, floats};
    rows_job b = {isa, (void *)g->b, g->ldb, wide.ldb, floats + a_n};
    rows_job c = {isa, g->c, g->ldc, wide.ldc, floats + a_n + b_n};
    ct_pool_run(widen_row, &a, a_rows);
    ct_pool_run(widen_row, &b, b_rows);
    if (g->beta != 0.0) {
        ct_pool_run(widen_row, &c, g->m);
    }
    wide.a = a.floats;
    wide.b = b.floats;
    wide.c = c.floats;
    ct_cpu_gemm_real(isa, &wide);
    ct_pool_run(narrow_row, &c, g->m);
    return CT_OK;
}

ct_status
ct_cpu_gemm_bf16(ct_isa isa, ct_scratch *scratch, const ct_gemm *gemm, ct_error *err)
{
#ifdef CT_HAVE_AMX
    if (ct_amx_usable(isa)) {
        return ct_cpu_gemm_amx(scratch, gemm, err);
    }
#endif
    return multiply_wide(isa, scratch, gemm, err);
}
