/* SGD for one element of type ct_real: the only place that states the formula. */

CT_ROUNDED(ct_sgd, CT_SGD_COEF)

/* Without momentum; there is no state. */
CT_HD static inline void
CT_REAL(ct_sgd_apply)(const CT_REAL(ct_sgd_coef) * c, ct_real grad, ct_real *param,
                      ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    (void)state;
    *param = *param - c->lr * g;
}

/* With momentum; state is its buffer. */
CT_HD static inline void
CT_REAL(ct_sgd_momentum_apply)(const CT_REAL(ct_sgd_coef) * c, ct_real grad,
                               ct_real *param, ct_real *state)
{
    const ct_real g = CT_REAL(ct_l2_grad)(grad, c->grad_scale, c->weight_decay, *param);
    const ct_real b =
        c->first ? g : state[0] * c->momentum + c->one_minus_dampening * g;
    const ct_real direction = c->nesterov ? g + c->momentum * b : b;

    *param = *param - c->lr * direction;
    state[0] = b;
}
