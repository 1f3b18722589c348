/* SGD over one piece of a span. Expanded by cpu/expand.h. */
static void
CT_NAME(sgd_plain)(const ct_sgd_coef *coef, const ct_sgd_span *span, size_t from,
                   size_t n, bool zero_grads)
{
    const CT_REAL(ct_sgd_coef) c = CT_REAL(ct_sgd_round)(coef);
    ct_elem *restrict grad = (ct_elem *)span->grad + from;
    ct_elem *restrict param = (ct_elem *)span->param + from;

    for (size_t i = 0; i < n; i++) {
        ct_real next = CT_LOAD(param[i]);
        CT_REAL(ct_sgd_plain)(&c, CT_LOAD(grad[i]), &next);
        param[i] = CT_STORE(next);
        if (zero_grads) {
            grad[i] = 0;
        }
    }
}

static void
CT_NAME(sgd_momentum)(const ct_sgd_coef *coef, const ct_sgd_span *span, size_t from,
                      size_t n, bool zero_grads)
{
    const CT_REAL(ct_sgd_coef) c = CT_REAL(ct_sgd_round)(coef);
    ct_elem *restrict grad = (ct_elem *)span->grad + from;
    ct_elem *restrict param = (ct_elem *)span->param + from;
    ct_elem *restrict momentum = (ct_elem *)span->momentum + from;

    for (size_t i = 0; i < n; i++) {
        ct_real next = CT_LOAD(param[i]);
        ct_real next_momentum = CT_LOAD(momentum[i]);
        CT_REAL(ct_sgd_momentum)(&c, CT_LOAD(grad[i]), &next, &next_momentum);
        param[i] = CT_STORE(next);
        momentum[i] = CT_STORE(next_momentum);
        if (zero_grads) {
            grad[i] = 0;
        }
    }
}
