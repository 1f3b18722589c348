/* Matrix products on a CUDA device, by cuBLAS. Mirrors csrc/cpu/gemm.c.
 *
 * cuBLAS is column major, and a row-major matrix read by columns is the transpose: the
 * call computes C' = op(B)' op(A)', with the operands in reverse order. fp32 stays
 * fp32: TF32 is off by default. */
#include "cublas.h"
#include "kernels.h"

/* The row stride for cuBLAS, at least `cols` even for a single row or none. */
static ct_status
row_stride(const char *name, size_t rows, size_t cols, size_t ld, int64_t *stride,
           ct_error *err)
{
    const size_t least = cols > 0 ? cols : 1;
    if (rows > 1 && ld < cols) {
        return ct_fail(err, CT_EINVAL, "gemm: ld%s must be >= %zu, got %zu", name, cols,
                       ld);
    }
    *stride = (int64_t)(rows > 1 && ld > least ? ld : least);
    return CT_OK;
}

static ct_status
product_of(const ct_gemm *g, ct_cublas_product *p, ct_error *err)
{
    const size_t a_rows = g->trans_a ? g->k : g->m, a_cols = g->trans_a ? g->m : g->k;
    const size_t b_rows = g->trans_b ? g->n : g->k, b_cols = g->trans_b ? g->k : g->n;

    p->dtype = g->dtype;
    p->trans_a = g->trans_b;
    p->trans_b = g->trans_a;
    p->m = (int64_t)g->n;
    p->n = (int64_t)g->m;
    p->k = (int64_t)g->k;
    p->alpha = g->alpha;
    p->beta = g->beta;
    p->a = g->b;
    p->b = g->a;
    p->c = g->c;
    ct_status status = row_stride("a", a_rows, a_cols, g->lda, &p->ldb, err);
    if (status == CT_OK) {
        status = row_stride("b", b_rows, b_cols, g->ldb, &p->lda, err);
    }
    return status == CT_OK ? row_stride("c", g->m, g->n, g->ldc, &p->ldc, err) : status;
}

ct_status
ct_cuda_gemm(void *stream, ct_scratch *scratch, const ct_gemm *gemm, ct_error *err)
{
    ct_cublas_product product;

    (void)scratch; /* cuBLAS has a workspace */
    if (gemm->dtype != CT_F32 && gemm->dtype != CT_F64 && gemm->dtype != CT_BF16) {
        return ct_fail(err, CT_EINVAL,
                       "gemm: dtype must be float32, float64 or bfloat16, got %s",
                       ct_dtype_name(gemm->dtype));
    }
    ct_status status = product_of(gemm, &product, err);
    if (status != CT_OK || gemm->m == 0 || gemm->n == 0) {
        return status;
    }
    return ct_cublas_gemm(stream, &product, err);
}
