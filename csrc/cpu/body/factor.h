/* The squares of one row of a matrix. Expanded by cpu/expand.h. */
static double
CT_NAME(add_row)(const void *data, size_t from, size_t n, double scale,
                 double *restrict columns)
{
    const ct_elem *restrict x = (const ct_elem *)data + from;
    double sums[LANES] = {0.0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t k = 0; k < LANES; k++) {
            const double value = (double)CT_LOAD(x[i + k]) * scale;
            sums[k] += value * value;
            columns[i + k] += value * value;
        }
    }
    for (size_t k = 0; i + k < n; k++) {
        const double value = (double)CT_LOAD(x[i + k]) * scale;
        sums[k] += value * value;
        columns[i + k] += value * value;
    }
    double sum = 0.0;
    for (size_t k = 0; k < LANES; k++) {
        sum += sums[k];
    }
    return sum;
}
