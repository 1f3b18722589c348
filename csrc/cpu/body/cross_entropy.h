/* One row of logits. Expanded by cpu/expand.h. */

/* The largest logit that is not NaN; a NaN makes the sum NaN. */
static inline ct_real
CT_NAME(row_most)(const ct_elem *restrict x, size_t n)
{
    ct_real lanes[LANES], most = (ct_real)-INFINITY;
    for (size_t k = 0; k < LANES; k++) {
        lanes[k] = most;
    }
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t k = 0; k < LANES; k++) {
            const ct_real value = CT_LOAD(x[i + k]);
            lanes[k] = value > lanes[k] ? value : lanes[k];
        }
    }
    for (size_t k = 0; i + k < n; k++) {
        const ct_real value = CT_LOAD(x[i + k]);
        lanes[k] = value > lanes[k] ? value : lanes[k];
    }
    for (size_t k = 0; k < LANES; k++) {
        most = lanes[k] > most ? lanes[k] : most;
    }
    return most;
}

/* Of exp(logit - most), or of the logits themselves. */
static inline double
CT_NAME(row_sum)(const ct_elem *restrict x, size_t n, bool powers, ct_real most)
{
    double lanes[LANES] = {0.0}, sum = 0.0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (size_t k = 0; k < LANES; k++) {
            const ct_real value = CT_LOAD(x[i + k]);
            lanes[k] += (double)(powers ? CT_REAL(ct_exp_below)(value - most) : value);
        }
    }
    for (size_t k = 0; i + k < n; k++) {
        const ct_real value = CT_LOAD(x[i + k]);
        lanes[k] += (double)(powers ? CT_REAL(ct_exp_below)(value - most) : value);
    }
    for (size_t k = 0; k < LANES; k++) {
        sum += lanes[k];
    }
    return sum;
}

static void
CT_NAME(cross_entropy)(const ct_cross_entropy *work, size_t row)
{
    const size_t n = work->classes, target = (size_t)work->targets[row];
    const double smoothing = work->smoothing;
    ct_elem *restrict x = (ct_elem *)work->logits + row * work->stride;
    const ct_real most = CT_NAME(row_most)(x, n), logit = CT_LOAD(x[target]);
    const ct_softmax_row found = {
        .most = (double)most,
        .sum = CT_NAME(row_sum)(x, n, true, most),
        .total = smoothing == 0.0 ? 0.0 : CT_NAME(row_sum)(x, n, false, most),
        .target = (double)logit,
    };
    work->losses[row] = ct_softmax_loss(&found, smoothing, n);
    if (!work->gradient) {
        return;
    }
    const ct_real factor = (ct_real)(work->scale / found.sum);
    const ct_real share = (ct_real)(work->scale * smoothing / (double)n);
    for (size_t i = 0; i < n; i++) {
        x[i] = CT_STORE(CT_REAL(ct_softmax_grad)(CT_LOAD(x[i]), most, factor, share));
    }
    const double power = (double)CT_REAL(ct_exp_below)(logit - most);
    x[target] =
        CT_STORE_F64(ct_softmax_target_grad(&found, power, smoothing, n, work->scale));
}
