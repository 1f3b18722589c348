/* Averages of squares by row and by column: operands of the device table's
 * `factor_sums` and `factor`. */
#ifndef CT_FACTORED_H
#define CT_FACTORED_H

#include "core/base/span.h"
#include "core/base/status.h"

#include <stddef.h>

CT_BEGIN_DECLS

/* A list of matrices of rows x cols, one behind the other, whose averages of squares
 * are kept by row and by column: row[b][i] and col[b][j]. Factors are of the type that
 * is computed in. */
typedef struct ct_factored {
    size_t matrices, rows, cols; /* each > 0 */
    size_t begin, n; /* the gradient is elements [begin, begin + n) of the list */
    const void *grad;
    double *sums; /* of squares: [matrices][rows], and behind them [matrices][cols] */
    void *row, *col;  /* become x * decay + (1 - decay) * (mean of squares + eps) */
    void *row_factor; /* becomes 1 / sqrt(row / mean of the matrix's rows) */
    void *col_factor; /* becomes 1 / sqrt(col) */
    ct_dtype grad_dtype, state_dtype, real;
    double grad_scale, decay, eps;
} ct_factored;

/* How many sums there are. */
static inline size_t
ct_factored_n_sums(const ct_factored *f)
{
    return f->matrices * (f->rows + f->cols);
}

/* CT_EINVAL names the first whose shape or dtypes do not fit. For the kernels of every
 * device. */
CT_NODISCARD ct_status ct_factor_check(const ct_factored *list, size_t n,
                                       ct_error *err);

CT_END_DECLS

#endif
