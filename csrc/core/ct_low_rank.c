#include "core/ct_low_rank.h"

#include <math.h>

static ct_status
multiply(const ct_low_rank *m, const ct_gemm *gemm, ct_error *err)
{
    return m->device->gemm(m->stream, m->scratch, gemm, err);
}

ct_status
ct_low_rank_project(const ct_low_rank *m, ct_error *err)
{
    const ct_gemm gemm = {.dtype = CT_F32,
                          .trans_b = true,
                          .m = m->rank,
                          .n = m->rows,
                          .k = m->cols,
                          .alpha = 1.0,
                          .a = m->q,
                          .b = m->matrix,
                          .c = m->p,
                          .lda = m->cols,
                          .ldb = m->cols,
                          .ldc = m->rows};
    return multiply(m, &gemm, err);
}

/* ---- orthonormal columns -----------------------------------------------------------
 */

static ct_status
sum_of_squares(const ct_low_rank *m, const float *column, double *sum, ct_error *err)
{
    const ct_span span = {(void *)column, m->rows, CT_F32};
    double there = 0.0;
    ct_status status =
        m->device->norm(m->stream, m->scratch, 2.0, &span, 1, &there, err);
    return status == CT_OK ? m->device->read(m->stream, &there, sum, err) : status;
}

/* column -= (column . unit) unit */
static ct_status
take_away(const ct_low_rank *m, float *column, const float *unit, ct_error *err)
{
    float dot = 0.0f;
    const ct_gemm inner = {.dtype = CT_F32,
                           .trans_b = true,
                           .m = 1,
                           .n = 1,
                           .k = m->rows,
                           .alpha = 1.0,
                           .a = column,
                           .b = unit,
                           .c = &dot,
                           .lda = m->rows,
                           .ldb = m->rows,
                           .ldc = 1};
    const ct_gemm outer = {.dtype = CT_F32,
                           .m = 1,
                           .n = m->rows,
                           .k = 1,
                           .alpha = -1.0,
                           .beta = 1.0,
                           .a = &dot,
                           .b = unit,
                           .c = column,
                           .lda = 1,
                           .ldb = m->rows,
                           .ldc = m->rows};
    const ct_status status = multiply(m, &inner, err);
    return status == CT_OK ? multiply(m, &outer, err) : status;
}

/* Length 1, or 0 where next to nothing is left of `before`: what is left of a float32
 * column that depends on others is its rounding, of 2^-24. */
static ct_status
normalise(const ct_low_rank *m, float *column, double before, ct_error *err)
{
    const ct_span span = {column, m->rows, CT_F32};
    double left = 0.0;
    const ct_status status = sum_of_squares(m, column, &left, err);
    if (status != CT_OK) {
        return status;
    }
    return left > before * 0x1p-40 ? m->device->scale(m->stream, 1.0 / sqrt(left),
                                                      (double)INFINITY, &span, 1, err)
                                   : m->device->zero(m->stream, &span, 1, err);
}

/* Gram and Schmidt, modified: what is taken away is measured on what is left. */
static ct_status
orthonormalise(const ct_low_rank *m, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < m->rank; i++) {
        float *column = m->p + i * m->rows;
        double before = 0.0;
        status = sum_of_squares(m, column, &before, err);
        for (size_t k = 0; status == CT_OK && k < i; k++) {
            status = take_away(m, column, m->p + k * m->rows, err);
        }
        if (status == CT_OK) {
            status = normalise(m, column, before, err);
        }
    }
    return status;
}

ct_status
ct_low_rank_fit(const ct_low_rank *m, ct_error *err)
{
    const ct_gemm gemm = {.dtype = CT_F32,
                          .m = m->rank,
                          .n = m->cols,
                          .k = m->rows,
                          .alpha = 1.0,
                          .a = m->p,
                          .b = m->matrix,
                          .c = m->q,
                          .lda = m->rows,
                          .ldb = m->cols,
                          .ldc = m->cols};
    const ct_status status = orthonormalise(m, err);
    return status == CT_OK ? multiply(m, &gemm, err) : status;
}

ct_status
ct_low_rank_expand(const ct_low_rank *m, double factor, float *product, ct_error *err)
{
    ct_gemm gemm = {.dtype = CT_F32,
                    .trans_a = true,
                    .m = m->rows,
                    .n = m->cols,
                    .k = m->rank,
                    .alpha = factor,
                    .a = m->p,
                    .b = m->q,
                    .c = product,
                    .lda = m->rows,
                    .ldb = m->cols,
                    .ldc = m->cols};
    const ct_status status = multiply(m, &gemm, err);
    gemm.alpha = -factor;
    gemm.beta = factor;
    gemm.c = m->matrix;
    return status == CT_OK ? multiply(m, &gemm, err) : status;
}
