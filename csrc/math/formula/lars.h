/* LARS for one element of type ct_real: the only place that states the formula. */

/* The constants rounded to the type. */
typedef struct CT_REAL(ct_lars_coef) {
    ct_real grad_scale;
    ct_real lr;
    ct_real momentum;
    ct_real one_minus_dampening;
    ct_real ratio;
    ct_real decay;
    int nesterov;
    int first;
} CT_REAL(ct_lars_coef);

CT_HD static inline CT_REAL(ct_lars_coef) CT_REAL(ct_lars_round)(const ct_lars_coef *c)
{
    CT_REAL(ct_lars_coef) r;
    r.grad_scale = (ct_real)c->grad_scale;
    r.lr = (ct_real)c->lr;
    r.momentum = (ct_real)c->momentum;
    r.one_minus_dampening = (ct_real)c->one_minus_dampening;
    r.ratio = (ct_real)c->ratio;
    r.decay = (ct_real)c->decay;
    r.nesterov = c->nesterov;
    r.first = c->first;
    return r;
}

CT_HD static inline ct_real
CT_REAL(ct_lars_scaled)(const CT_REAL(ct_lars_coef) * c, ct_real grad, ct_real param)
{
    return c->ratio * (grad * c->grad_scale + c->decay * param);
}

/* Terms are what the sums are of; the state is left alone. */
CT_HD static inline void
CT_REAL(ct_lars_measure)(const CT_REAL(ct_lars_coef) * c, ct_real grad, ct_real param,
                         ct_real *state, ct_real *terms)
{
    (void)state;
    terms[0] = grad * c->grad_scale;
    terms[1] = param;
}

/* Without momentum; there is no state. */
CT_HD static inline void
CT_REAL(ct_lars_apply)(const CT_REAL(ct_lars_coef) * c, ct_real grad, ct_real *param,
                       ct_real *state)
{
    (void)state;
    *param = *param - c->lr * CT_REAL(ct_lars_scaled)(c, grad, *param);
}

CT_HD static inline void
CT_REAL(ct_lars_momentum_measure)(const CT_REAL(ct_lars_coef) * c, ct_real grad,
                                  ct_real param, ct_real *state, ct_real *terms)
{
    CT_REAL(ct_lars_measure)(c, grad, param, state, terms);
}

/* With momentum; state is its buffer. */
CT_HD static inline void
CT_REAL(ct_lars_momentum_apply)(const CT_REAL(ct_lars_coef) * c, ct_real grad,
                                ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_lars_scaled)(c, grad, *param);
    const ct_real b =
        c->first ? g : state[0] * c->momentum + c->one_minus_dampening * g;

    *param = *param - c->lr * (c->nesterov ? g + c->momentum * b : b);
    state[0] = b;
}
