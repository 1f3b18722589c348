/* Muon's momentum for one element of type ct_real: the only place that states it. */

/* The constants rounded to the type. */
typedef struct CT_REAL(ct_muon_coef) {
    ct_real grad_scale;
    ct_real momentum;
    ct_real one_minus_momentum;
    ct_real inv_norm;
    int nesterov;
    int from_grad;
} CT_REAL(ct_muon_coef);

CT_HD static inline CT_REAL(ct_muon_coef) CT_REAL(ct_muon_round)(const ct_muon_coef *c)
{
    CT_REAL(ct_muon_coef) r;
    r.grad_scale = (ct_real)c->grad_scale;
    r.momentum = (ct_real)c->momentum;
    r.one_minus_momentum = (ct_real)c->one_minus_momentum;
    r.inv_norm = (ct_real)c->inv_norm;
    r.nesterov = c->nesterov;
    r.from_grad = c->from_grad;
    return r;
}

/* momentum * average + (1 - momentum) * grad, from the nearer end. */
CT_HD static inline ct_real
CT_REAL(ct_muon_blend)(const CT_REAL(ct_muon_coef) * c, ct_real grad, ct_real average)
{
    return c->from_grad ? grad + c->momentum * (average - grad)
                        : average + c->one_minus_momentum * (grad - average);
}

CT_HD static inline ct_real
CT_REAL(ct_muon_direction)(const CT_REAL(ct_muon_coef) * c, ct_real grad,
                           ct_real average)
{
    return c->nesterov ? CT_REAL(ct_muon_blend)(c, grad * c->grad_scale, average)
                       : average;
}

/* The new momentum buffer; the sum is of the direction. */
CT_HD static inline void
CT_REAL(ct_muon_measure)(const CT_REAL(ct_muon_coef) * c, ct_real grad, ct_real param,
                         ct_real *state, ct_real *terms)
{
    (void)param;
    state[0] = CT_REAL(ct_muon_blend)(c, grad * c->grad_scale, state[0]);
    terms[0] = CT_REAL(ct_muon_direction)(c, grad, state[0]);
    terms[1] = 0;
}

CT_HD static inline void
CT_REAL(ct_muon_apply)(const CT_REAL(ct_muon_coef) * c, ct_real grad, ct_real *param,
                       ct_real *state)
{
    *param = c->inv_norm * CT_REAL(ct_muon_direction)(c, grad, state[0]);
}
