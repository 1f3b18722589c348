/* SGD for one element of type ct_real: the only place that states the formula. */

/* The constants rounded to the type. */
typedef struct CT_REAL(ct_sgd_coef) {
    ct_real grad_scale;
    ct_real lr;
    ct_real momentum;
    ct_real one_minus_dampening;
    ct_real weight_decay;
    int nesterov;
    int first;
} CT_REAL(ct_sgd_coef);

CT_HD static inline CT_REAL(ct_sgd_coef) CT_REAL(ct_sgd_round)(const ct_sgd_coef *c)
{
    CT_REAL(ct_sgd_coef) r;
    r.grad_scale = (ct_real)c->grad_scale;
    r.lr = (ct_real)c->lr;
    r.momentum = (ct_real)c->momentum;
    r.one_minus_dampening = (ct_real)c->one_minus_dampening;
    r.weight_decay = (ct_real)c->weight_decay;
    r.nesterov = c->nesterov;
    r.first = c->first;
    return r;
}

/* The scaled gradient with the weight decay. Without one the parameter does not enter,
 * not even as 0 * Inf. */
CT_HD static inline ct_real
CT_REAL(ct_sgd_decayed)(const CT_REAL(ct_sgd_coef) * c, ct_real grad, ct_real param)
{
    const ct_real g = grad * c->grad_scale;
    return c->weight_decay != (ct_real)0 ? g + c->weight_decay * param : g;
}

/* Without momentum; there is no state. */
CT_HD static inline void
CT_REAL(ct_sgd_apply)(const CT_REAL(ct_sgd_coef) * c, ct_real grad, ct_real *param,
                      ct_real *state)
{
    (void)state;
    *param = *param - c->lr * CT_REAL(ct_sgd_decayed)(c, grad, *param);
}

/* With momentum; state is its buffer. */
CT_HD static inline void
CT_REAL(ct_sgd_momentum_apply)(const CT_REAL(ct_sgd_coef) * c, ct_real grad,
                               ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_sgd_decayed)(c, grad, *param);
    const ct_real b =
        c->first ? g : state[0] * c->momentum + c->one_minus_dampening * g;
    const ct_real direction = c->nesterov ? g + c->momentum * b : b;

    *param = *param - c->lr * direction;
    state[0] = b;
}
