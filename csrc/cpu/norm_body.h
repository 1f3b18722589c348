/* Squares of one piece, added to the lanes. Expanded by cpu/expand.h. */
static void
CT_NAME(norm)(const void *data, size_t from, size_t n, double *restrict lanes)
{
    const ct_elem *restrict x = (const ct_elem *)data + from;
    double sums[LANES];
    memcpy(sums, lanes, sizeof sums);

    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t k = 0; k < LANES; k++) {
            const double value = (double)CT_LOAD(x[i + k]);
            sums[k] += value * value;
        }
    }
    for (size_t k = 0; i + k < n; k++) {
        const double value = (double)CT_LOAD(x[i + k]);
        sums[k] += value * value;
    }
    memcpy(lanes, sums, sizeof sums);
}
