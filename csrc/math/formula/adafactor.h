/* Adafactor for one element of type ct_real: the only place that states the formula. */

/* The constants rounded to the type. */
typedef struct CT_REAL(ct_adafactor_coef) {
    ct_real grad_scale;
    ct_real beta1;
    ct_real one_minus_beta1;
    ct_real beta2;
    ct_real one_minus_beta2;
    ct_real eps;
    ct_real factor;
    ct_real decay;
    int factored;
} CT_REAL(ct_adafactor_coef);

CT_HD static inline CT_REAL(ct_adafactor_coef)
    CT_REAL(ct_adafactor_round)(const ct_adafactor_coef *c)
{
    CT_REAL(ct_adafactor_coef) r;
    r.grad_scale = (ct_real)c->grad_scale;
    r.beta1 = (ct_real)c->beta1;
    r.one_minus_beta1 = (ct_real)c->one_minus_beta1;
    r.beta2 = (ct_real)c->beta2;
    r.one_minus_beta2 = (ct_real)c->one_minus_beta2;
    r.eps = (ct_real)c->eps;
    r.factor = (ct_real)c->factor;
    r.decay = (ct_real)c->decay;
    r.factored = c->factored;
    return r;
}

CT_HD static inline ct_real
CT_REAL(ct_adafactor_direction)(const CT_REAL(ct_adafactor_coef) * c, ct_real grad,
                                ct_real moment)
{
    const ct_real g = grad * c->grad_scale;
    return c->factored ? g * moment : g / CT_SQRT(moment);
}

/* The new second moment, unless it is factored; terms are what the sums are of. */
CT_HD static inline void
CT_REAL(ct_adafactor_measure)(const CT_REAL(ct_adafactor_coef) * c, ct_real grad,
                              ct_real param, ct_real *state, ct_real *terms)
{
    const ct_real g = grad * c->grad_scale;
    const ct_real v = state[0] * c->beta2 + c->one_minus_beta2 * (g * g + c->eps);
    state[0] = c->factored ? state[0] : v;
    terms[0] = CT_REAL(ct_adafactor_direction)(c, grad, state[0]);
    terms[1] = param;
}

/* Without the first moment. */
CT_HD static inline void
CT_REAL(ct_adafactor_apply)(const CT_REAL(ct_adafactor_coef) * c, ct_real grad,
                            ct_real *param, ct_real *state)
{
    const ct_real u = CT_REAL(ct_adafactor_direction)(c, grad, state[0]);
    *param = *param * c->decay - c->factor * u;
}

CT_HD static inline void
CT_REAL(ct_adafactor_momentum_measure)(const CT_REAL(ct_adafactor_coef) * c,
                                       ct_real grad, ct_real param, ct_real *state,
                                       ct_real *terms)
{
    CT_REAL(ct_adafactor_measure)(c, grad, param, state, terms);
}

/* With the first moment, of the scaled updates, as the second state. */
CT_HD static inline void
CT_REAL(ct_adafactor_momentum_apply)(const CT_REAL(ct_adafactor_coef) * c, ct_real grad,
                                     ct_real *param, ct_real *state)
{
    const ct_real u = CT_REAL(ct_adafactor_direction)(c, grad, state[0]);
    state[1] = state[1] * c->beta1 + c->one_minus_beta1 * (c->factor * u);
    *param = *param * c->decay - state[1];
}
