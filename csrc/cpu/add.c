/* Sums of pairs of spans on the CPU. Mirrors cuda/add.cu. */
#include "cpu/kernels.h"
#include "cpu/tile.h"

#include "core/comm/reduce.h"

#include <math.h>

static void
add_tile(const ct_span *sum, const void *values)
{
    const void *const rows[2] = {sum->data, values};
    ct_reduce(sum->data, rows, 2, sum->n, sum->dtype, CT_REDUCE_SUM);
}

/* Values of another dtype, or with a factor, are made what is added a tile at a time.
 */
static ct_status
add_converted(const ct_span *sums, const ct_span *values, double factor, ct_error *err)
{
    ct_tile tile;
    ct_status status = CT_OK;
    for (size_t at = 0; status == CT_OK && at < sums->n; at += CT_TILE) {
        const size_t n = sums->n - at < CT_TILE ? sums->n - at : CT_TILE;
        const ct_span from = ct_span_part(*values, at, n);
        const ct_span sum = ct_span_part(*sums, at, n);
        const ct_span converted = {&tile, n, sum.dtype};
        status = ct_cpu_copy(NULL, &converted, &from, 1, err);
        if (status == CT_OK && factor != 1.0) {
            status = ct_cpu_scale(NULL, factor, (double)INFINITY, &converted, 1, err);
        }
        if (status == CT_OK) {
            add_tile(&sum, &tile);
        }
    }
    return status;
}

ct_status
ct_cpu_add(void *stream, const ct_span *sums, const ct_span *values, size_t n_spans,
           double factor, ct_error *err)
{
    (void)stream;
    ct_status status = ct_check_pairs("add", sums, values, n_spans, err);
    for (size_t i = 0; status == CT_OK && i < n_spans; i++) {
        if (sums[i].dtype == values[i].dtype && factor == 1.0) {
            add_tile(&sums[i], values[i].data);
        }
        else {
            status = add_converted(&sums[i], &values[i], factor, err);
        }
    }
    return status;
}
