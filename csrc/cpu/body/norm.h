/* Adds powers of a piece to the lanes. Expanded by cpu/expand.h. */
static inline void
CT_NAME(norm)(ct_norm_kind kind, double p, const void *data, size_t from, size_t n,
              double *restrict lanes)
{
    const ct_elem *restrict x = (const ct_elem *)data + from;
    double sums[LANES];
    memcpy(sums, lanes, sizeof sums);

    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t k = 0; k < LANES; k++) {
            sums[k] = ct_norm_add(kind, p, sums[k], (double)CT_LOAD(x[i + k]));
        }
    }
    for (size_t k = 0; i + k < n; k++) {
        sums[k] = ct_norm_add(kind, p, sums[k], (double)CT_LOAD(x[i + k]));
    }
    memcpy(lanes, sums, sizeof sums);
}

/* A loop for each kind: the choice is made outside the loop. */
static void
CT_NAME(norms)(ct_norm_kind kind, double p, const void *data, size_t from, size_t n,
               double *restrict lanes)
{
    switch (kind) {
    case CT_NORM_TWO:
        CT_NAME(norm)(CT_NORM_TWO, p, data, from, n, lanes);
        break;
    case CT_NORM_ONE:
        CT_NAME(norm)(CT_NORM_ONE, p, data, from, n, lanes);
        break;
    case CT_NORM_MAX:
        CT_NAME(norm)(CT_NORM_MAX, p, data, from, n, lanes);
        break;
    case CT_NORM_WHOLE:
        CT_NAME(norm)(CT_NORM_WHOLE, p, data, from, n, lanes);
        break;
    default:
        CT_NAME(norm)(CT_NORM_POWER, p, data, from, n, lanes);
    }
}
