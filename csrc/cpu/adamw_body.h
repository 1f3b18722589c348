/* AdamW over one piece of a span. Expanded by cpu/expand.h. */
static void
CT_NAME(adamw)(const ct_adamw_coef *coef, const ct_adamw_span *span, size_t from,
               size_t n, bool zero_grads)
{
    const CT_REAL(ct_adamw_coef) c = CT_REAL(ct_adamw_round)(coef);
    ct_elem *restrict grad = (ct_elem *)span->grad + from;
    ct_elem *restrict param = (ct_elem *)span->param + from;
    ct_elem *restrict m = (ct_elem *)span->m + from;
    ct_elem *restrict v = (ct_elem *)span->v + from;

    for (size_t i = 0; i < n; i++) {
        ct_real next = CT_LOAD(param[i]);
        ct_real next_m = CT_LOAD(m[i]);
        ct_real next_v = CT_LOAD(v[i]);
        CT_REAL(ct_adamw_apply)(&c, CT_LOAD(grad[i]), &next, &next_m, &next_v);
        param[i] = CT_STORE(next);
        m[i] = CT_STORE(next_m);
        v[i] = CT_STORE(next_v);
        if (zero_grads) {
            grad[i] = 0;
        }
    }
}
