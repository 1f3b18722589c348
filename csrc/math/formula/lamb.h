/* LAMB for one element of type ct_real: the only place that states the formula. */

/* The constants rounded to the type. */
typedef struct CT_REAL(ct_lamb_coef) {
    ct_real grad_scale;
    ct_real l2;
    ct_real beta1;
    ct_real share;
    ct_real beta2;
    ct_real one_minus_beta2;
    ct_real inv_bias1;
    ct_real inv_bias2;
    ct_real eps;
    ct_real weight_decay;
    ct_real step_size;
} CT_REAL(ct_lamb_coef);

CT_HD static inline CT_REAL(ct_lamb_coef) CT_REAL(ct_lamb_round)(const ct_lamb_coef *c)
{
    CT_REAL(ct_lamb_coef) r;
    r.grad_scale = (ct_real)c->grad_scale;
    r.l2 = (ct_real)c->l2;
    r.beta1 = (ct_real)c->beta1;
    r.share = (ct_real)c->share;
    r.beta2 = (ct_real)c->beta2;
    r.one_minus_beta2 = (ct_real)c->one_minus_beta2;
    r.inv_bias1 = (ct_real)c->inv_bias1;
    r.inv_bias2 = (ct_real)c->inv_bias2;
    r.eps = (ct_real)c->eps;
    r.weight_decay = (ct_real)c->weight_decay;
    r.step_size = (ct_real)c->step_size;
    return r;
}

/* state is the moments of grad and of grad^2. */
CT_HD static inline ct_real
CT_REAL(ct_lamb_direction)(const CT_REAL(ct_lamb_coef) * c, ct_real param,
                           const ct_real *state)
{
    const ct_real denom = CT_SQRT(state[1]) * c->inv_bias2 + c->eps;
    return state[0] * c->inv_bias1 / denom + c->weight_decay * param;
}

/* The new moments; terms are what the sums are of. */
CT_HD static inline void
CT_REAL(ct_lamb_measure)(const CT_REAL(ct_lamb_coef) * c, ct_real grad, ct_real param,
                         ct_real *state, ct_real *terms)
{
    const ct_real g = grad * c->grad_scale + c->l2 * param;
    state[0] = state[0] * c->beta1 + c->share * g;
    state[1] = state[1] * c->beta2 + c->one_minus_beta2 * g * g;
    terms[0] = CT_REAL(ct_lamb_direction)(c, param, state);
    terms[1] = param;
}

/* The moments are the new ones: the direction is worked out again, which costs less
 * than to keep it. */
CT_HD static inline void
CT_REAL(ct_lamb_apply)(const CT_REAL(ct_lamb_coef) * c, ct_real grad, ct_real *param,
                       ct_real *state)
{
    (void)grad;
    *param = *param - c->step_size * CT_REAL(ct_lamb_direction)(c, *param, state);
}
