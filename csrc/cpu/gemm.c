/* Matrix product on the CPU: by the BLAS of the process, else in tiles of the result.
 * Mirrors cuda/gemm.cu.
 *
 * A tile of the result, the packed blocks of both factors and the sums stay in the
 * first two levels of cache. Factors in bfloat16 are converted to float32 exactly, and
 * the product is rounded once. */
#include "cpu/kernels.h"

#include "core/base/pool.h"

#include <stdatomic.h>
#include <string.h>

static _Atomic(ct_blas_fn *) process_blas;

void
ct_cpu_use_blas(ct_blas_fn *blas)
{
    atomic_store_explicit(&process_blas, blas, memory_order_release);
}

static bool
blas_gemm(const ct_gemm *gemm)
{
    ct_blas_fn *blas = atomic_load_explicit(&process_blas, memory_order_acquire);
    return blas != NULL && blas(gemm);
}

/* ---- products in tiles ----------------------------------------------------------- */

enum {
    TILE = 64,
    DEPTH = 128,
    STRIP = 32
};

#define CT_BODY "cpu/body/gemm.h"
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

static void
multiply(ct_isa isa, const ct_gemm *gemm)
{
    gemm_job job = {
        .gemm = gemm,
        .body = bodies[isa][gemm->dtype],
        .tiles_across = (gemm->n - 1) / TILE + 1,
    };
    ct_pool_run(run_tile, &job, job.tiles_across * ((gemm->m - 1) / TILE + 1));
}

typedef struct matrix {
    ct_dtype dtype;
    void *data;
    size_t rows, cols, ld;
} matrix;

static ct_status
convert(const matrix *to, const matrix *from, ct_error *err)
{
    const bool adjacent = to->ld == to->cols && from->ld == to->cols;
    const size_t rows = adjacent ? 1 : to->rows;
    const size_t cols = adjacent ? to->rows * to->cols : to->cols;
    ct_status status = CT_OK;
    for (size_t row = 0; status == CT_OK && row < rows; row++) {
        char *const t = (char *)to->data + row * to->ld * ct_dtype_size(to->dtype);
        char *const f =
            (char *)from->data + row * from->ld * ct_dtype_size(from->dtype);
        const ct_span target = {t, cols, to->dtype}, source = {f, cols, from->dtype};
        status = ct_cpu_copy(NULL, &target, &source, 1, err);
    }
    return status;
}

/* Converts the matrix to float32 at `floats`, with adjacent rows. */
static matrix
widened(const matrix *m, float *floats)
{
    return (matrix){CT_F32, floats, m->rows, m->cols, m->cols};
}

static ct_status
multiply_bf16(ct_isa isa, ct_scratch *scratch, const ct_gemm *g, ct_error *err)
{
    const size_t m = g->m, n = g->n, k = g->k;
    const matrix a = {CT_BF16, (void *)g->a, g->trans_a ? k : m, g->trans_a ? m : k,
                      g->lda};
    const matrix b = {CT_BF16, (void *)g->b, g->trans_b ? n : k, g->trans_b ? k : n,
                      g->ldb};
    const matrix c = {CT_BF16, g->c, m, n, g->ldc};
    ct_status status =
        ct_cpu_scratch_grow(scratch, (m * k + k * n + m * n) * sizeof(float), err);
    if (status != CT_OK) {
        return status;
    }
    float *const floats = scratch->data;
    const matrix wide_a = widened(&a, floats), wide_b = widened(&b, floats + m * k);
    const matrix wide_c = widened(&c, floats + m * k + k * n);
    ct_gemm wide = *g;
    wide.dtype = CT_F32;
    wide.a = wide_a.data;
    wide.b = wide_b.data;
    wide.c = wide_c.data;
    wide.lda = wide_a.ld;
    wide.ldb = wide_b.ld;
    wide.ldc = wide_c.ld;
    status = convert(&wide_a, &a, err);
    if (status == CT_OK) {
        status = convert(&wide_b, &b, err);
    }
    if (status == CT_OK && g->beta != 0.0) {
        status = convert(&wide_c, &c, err);
    }
    if (status == CT_OK) {
        if (!blas_gemm(&wide)) {
            multiply(isa, &wide);
        }
        status = convert(&c, &wide_c, err);
    }
    return status;
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
    if (blas_gemm(gemm)) {
        return CT_OK;
    }
    if (gemm->dtype == CT_BF16) {
        return multiply_bf16(isa, scratch, gemm, err);
    }
    multiply(isa, gemm);
    return CT_OK;
}
