/* Checks of factored second moments, for the kernels of every device. */
#include "core/device/factored.h"

#include <stdbool.h>

static bool
is_real(ct_dtype dtype)
{
    return dtype == CT_F32 || dtype == CT_F64;
}

ct_status
ct_factor_check(const ct_factored *list, size_t n, ct_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const ct_factored *f = &list[i];
        if (f->matrices == 0 || f->rows == 0 || f->cols == 0) {
            return ct_fail(err, CT_EINVAL,
                           "factor: number %zu is %zu matrices of %zu x %zu; each has "
                           "to be at least 1",
                           i, f->matrices, f->rows, f->cols);
        }
        const size_t all = f->matrices * f->rows * f->cols;
        if (f->begin > all || f->n > all - f->begin) {
            return ct_fail(err, CT_EINVAL,
                           "factor: number %zu has gradients of %zu elements from "
                           "number %zu on, of %zu",
                           i, f->n, f->begin, all);
        }
        if (!ct_dtype_is_float(f->grad_dtype)) {
            return ct_fail(err, CT_EINVAL,
                           "factor: number %zu has gradients of %s, and only float "
                           "dtypes work",
                           i, ct_dtype_name(f->grad_dtype));
        }
        if (!is_real(f->state_dtype) || !is_real(f->real)) {
            return ct_fail(err, CT_EINVAL,
                           "factor: number %zu has averages of %s and factors of %s; "
                           "expected float32 or float64",
                           i, ct_dtype_name(f->state_dtype), ct_dtype_name(f->real));
        }
    }
    return CT_OK;
}
